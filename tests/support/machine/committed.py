# SPDX-License-Identifier: Apache-2.0
"""Files as a commit, which is the same one wherever it is made of the same files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from support.machine.ran import ran

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
_WHEN = "2023-11-14T22:13:20+0000"


def git_environment() -> dict[str, str]:
    """For git: nobody's settings, a fixed author and a fixed time."""
    return {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_AUTHOR_NAME": "Somebody",
        "GIT_AUTHOR_EMAIL": "somebody@example.org",
        "GIT_COMMITTER_NAME": "Somebody",
        "GIT_COMMITTER_EMAIL": "somebody@example.org",
        "GIT_AUTHOR_DATE": _WHEN,
        "GIT_COMMITTER_DATE": _WHEN,
    }


def commit_all(tree: Path) -> None:
    """Commits every file of a directory that git does not ignore."""
    for argv in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "-m", "all")):
        done = ran("git", *argv, cwd=tree, env=git_environment())
        assert done.returncode == 0, done.stderr


def committed_copy(checkout: Path, tree: Path) -> Path:
    """A checkout's files, with what is not committed there, as one commit in a new directory."""
    shutil.copytree(checkout, tree, ignore=_NOT_COPIED)
    commit_all(tree)
    return tree
