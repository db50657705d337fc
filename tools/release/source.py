# SPDX-License-Identifier: Apache-2.0
"""The source archive: the files of a commit, as PyPI wants them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from infiniswap.errors import SystemCallError
from release.commit import Commit, git

_BUILD = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def make_source(commit: Commit, work: Path, into: Path) -> Path:
    """Writes the archive.

    Args:
        commit: the files of which are taken, and nothing that git ignores.
        work: a directory for them, not there yet.
        into: the directory for the archive.

    Raises:
        SystemCallError: it cannot be made.
    """
    work.mkdir(parents=True)
    tar = work.with_suffix(".tar")
    git(commit.checkout, "archive", "--format=tar", f"--output={tar.resolve()}", "HEAD")
    _run(["tar", "--extract", f"--file={tar.resolve()}"], work, {})
    _run(
        [sys.executable, "-c", _BUILD, str(into.resolve())],
        work,
        {"SOURCE_DATE_EPOCH": str(commit.made_s)},
    )
    return into / f"infiniswap-{commit.version}.tar.gz"


def _run(argv: list[str], where: Path, changes: dict[str, str]) -> None:
    done = subprocess.run(
        argv,
        cwd=where,
        env={**os.environ, **changes},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemCallError(f"{argv[0]} failed: {done.stderr.strip()}", where=str(where))
