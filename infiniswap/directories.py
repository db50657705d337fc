# SPDX-License-Identifier: Apache-2.0
"""Directories are made with the rights that they are to have."""

from __future__ import annotations

from pathlib import Path


def make_directory(path: Path, mode: int) -> None:
    """Makes a directory, and those that lead there (mode 0755), with these rights whatever the
    umask is. One that is there already stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if not path.parent.is_dir():
        make_directory(path.parent, 0o755)
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    path.chmod(mode)
