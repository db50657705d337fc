# SPDX-License-Identifier: Apache-2.0
"""The commit that a release is made of, and what is in the way of one."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import SystemCallError, UsageError

_NAMED_MAX = 3
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Commit:
    """What is released.

    Attributes:
        checkout: its clean work tree.
        name: its hexadecimal digits.
        made_s: when, since the epoch.
        version: of the project.
        is_tagged: it is the commit of that version's tag.
        changes: files in changes.d/ that no section of CHANGELOG.md has yet.
    """

    checkout: Path
    name: str
    made_s: int
    version: str
    is_tagged: bool
    changes: tuple[str, ...]

    @property
    def remark(self) -> str:
        """Why this is no release that can be published; empty for one that can."""
        if self.changes:
            return (
                f"changes.d/ has {len(self.changes)} entries, so this is a build of commit "
                f"{self.name[:12]} and not release {self.version}. Before a release, raise the "
                "version and run `make changelog` (CONTRIBUTING.md)."
            )
        if not self.is_tagged:
            return (
                f"commit {self.name[:12]} has no tag v{self.version}. Tag it, then run "
                "`make release` again: the packages for Debian have another version without it."
            )
        return ""


def look_at(checkout: Path) -> Commit:
    """The commit that is checked out.

    Raises:
        UsageError: no release can be made of it.
        SystemCallError: git cannot be run.
    """
    if not (checkout / ".git").exists():
        raise UsageError(
            "a release is made of a commit, and this directory is no checkout of git",
            where=str(checkout),
            mend="Clone the repository and run `make release` there.",
        )
    # Each line: two letters of its state, a space, the path.
    changed = [line[3:] for line in git(checkout, "status", "--porcelain").splitlines()]
    if changed:
        more = f" and {len(changed) - _NAMED_MAX} more" if len(changed) > _NAMED_MAX else ""
        raise UsageError(
            f"the work tree differs from its commit: {', '.join(changed[:_NAMED_MAX])}{more}",
            where=str(checkout),
            mend="Commit the changes, or put them away with `git stash --include-untracked`.",
        )
    version = _version(checkout)
    return Commit(
        checkout,
        git(checkout, "rev-parse", "HEAD").strip(),
        int(git(checkout, "log", "-1", "--format=%ct")),
        version,
        f"v{version}" in git(checkout, "tag", "--points-at", "HEAD").split(),
        tuple(sorted(path.name for path in (checkout / "changes.d").glob("+*.md"))),
    )


def _version(checkout: Path) -> str:
    """Of the project, which two files name."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"]
    package = _VERSION.search((checkout / "infiniswap" / "__init__.py").read_text())
    if package is None or package[1] != project:
        raise UsageError(
            f"pyproject.toml has version {project} and infiniswap/__init__.py "
            f"{package[1] if package else 'none'}",
            where=str(checkout),
            mend="Write the same version into both, and commit.",
        )
    return str(project)


def git(checkout: Path, *argv: str) -> str:
    """What a command of git says.

    Raises:
        SystemCallError: it fails, or there is no git.
    """
    # Root may build what another user has checked out.
    allow = ("-c", f"safe.directory={checkout.resolve()}")
    command = ["git", *allow, "-C", str(checkout), *argv]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SystemCallError("git is not installed", mend="Install git.") from error
    except subprocess.CalledProcessError as error:
        raise SystemCallError(
            f"`git {' '.join(argv)}` failed: {error.stderr.strip()}", where=str(checkout)
        ) from error
    return done.stdout
