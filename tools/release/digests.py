# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of files, and the list that `sha256sum --check` reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUMS = "SHA256SUMS"


def sha256(path: Path) -> str:
    """Hexadecimal, of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(directory: Path) -> None:
    """Writes the list of all other files of a directory into it."""
    files = sorted(path for path in directory.iterdir() if path.name != SUMS)
    lines = [f"{sha256(path)}  {path.name}\n" for path in files]
    (directory / SUMS).write_text("".join(lines))
