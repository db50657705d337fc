# SPDX-License-Identifier: Apache-2.0
"""Release notes: the section of CHANGELOG.md, or of a commit between releases its entries."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime

from infiniswap.errors import SystemCallError, UsageError
from release.commit import Commit


def release_notes(commit: Commit) -> str:
    """Markdown that begins with the heading of the version.

    Raises:
        UsageError: CHANGELOG.md has no section of the version.
        SystemCallError: towncrier fails.
    """
    if commit.changes:
        return _draft(commit)
    text = (commit.checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    begin = rf"^## {re.escape(commit.version)} .*?(?=^## |\Z)"
    section = re.search(begin, text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise UsageError(
            f"there is no section of version {commit.version}",
            where=str(commit.checkout / "CHANGELOG.md"),
            mend="Run `make changelog`, and commit.",
        )
    return section[0].rstrip() + "\n"


def _draft(commit: Commit) -> str:
    """What the next section would be; its date is that of the commit."""
    date = datetime.fromtimestamp(commit.made_s, UTC).date().isoformat()
    version = f"{commit.version}+{commit.name[:12]}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "towncrier", "build", "--draft"),
            *("--version", version, "--date", date),
        ],
        cwd=commit.checkout,
        check=False,
        capture_output=True,
        text=True,
    )
    begin = done.stdout.find(f"## {version}")
    if done.returncode != 0 or begin < 0:
        raise SystemCallError(
            f"towncrier failed: {done.stderr.strip()}", where=str(commit.checkout / "changes.d")
        )
    return done.stdout[begin:].rstrip() + "\n"
