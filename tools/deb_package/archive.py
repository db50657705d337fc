# SPDX-License-Identifier: Apache-2.0
"""From a tree to a .deb: the same bytes for the same tree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from infiniswap.errors import SystemCallError, UnavailableError


def pack(top: Path, target: Path, built_s: int) -> None:
    """Writes the package.

    Args:
        top: the tree, with DEBIAN/.
        target: the file to write.
        built_s: the time of every file in it.

    Raises:
        UnavailableError: this host has no dpkg-deb.
        SystemCallError: dpkg-deb failed.
    """
    for path in (*top.rglob("*"), top):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
        os.utime(path, (built_s, built_s), follow_symlinks=False)
    # One thread: how many there are shows in what xz writes.
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--threads-max=1", "--build"]
    try:
        done = subprocess.run(
            [*command, str(top), str(target)],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(built_s), "LC_ALL": "C"},
            check=False,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        raise UnavailableError(
            "the command dpkg-deb is not installed", mend="Build the package on Debian."
        ) from error
    if done.returncode != 0:
        raise SystemCallError(f"dpkg-deb failed: {done.stderr.strip()}", where=str(top))
