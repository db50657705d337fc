# SPDX-License-Identifier: Apache-2.0
"""The version of a package: that of a release, or of a commit after one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from infiniswap import __version__
from infiniswap.errors import UsageError


def package_version(checkout: Path, given: str | None = None) -> str:
    """Its part before `~debNN`. Of two commits the later one has the higher version.

    Args:
        checkout: a tree with or without git's history.
        given: what to answer.

    Raises:
        UsageError: it would be no version of a package.
    """
    version = given or f"{__version__}{_since_release(checkout)}"
    if not (version[:1].isdigit() and all(c.isalnum() or c in ".+~" for c in version)):
        raise UsageError(
            f"{version!r} cannot be the version of a package",
            where="--version",
            mend="It begins with a digit and consists of letters, digits and the characters . + ~",
        )
    return version


def _since_release(checkout: Path) -> str:
    """Commits up to here and the last one's name; nothing at a release's tag and without git."""
    if not (checkout / ".git").exists():
        return ""
    if f"v{__version__}" in _git(checkout, "tag", "--points-at", "HEAD").split():
        return ""
    count = _git(checkout, "rev-list", "--count", "HEAD").strip()
    name = _git(checkout, "rev-parse", "--short=8", "HEAD").strip()
    return f"+{count}.g{name}"


def _git(checkout: Path, *argv: str) -> str:
    # Root may build what another user has checked out.
    allow = ("-c", f"safe.directory={checkout.resolve()}")
    return subprocess.run(
        ["git", *allow, "-C", str(checkout), *argv], check=True, capture_output=True, text=True
    ).stdout
