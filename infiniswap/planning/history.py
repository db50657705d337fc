# SPDX-License-Identifier: Apache-2.0
"""What plans have measured on this host: a file in the state directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from infiniswap.directories import make_directory
from infiniswap.errors import from_oserror
from infiniswap.planning.prediction import Measured
from infiniswap.system.files import try_read_text

NAME: Final = "plan-history.json"
_KEPT_MAX: Final = 64


def path_in(state_dir: Path) -> Path:
    """Its place."""
    return state_dir / NAME


def read(path: Path) -> tuple[Measured, ...]:
    """What is there; nothing where the file is missing, or not one of ours."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(try_read_text(path) or "[]", type=tuple[Measured, ...])
    return ()


def add(path: Path, new: Measured) -> None:
    """Adds a measurement, and drops the oldest ones.

    Raises:
        NotPermittedError, SystemCallError: the file cannot be written.
    """
    write(path, (*read(path), new)[-_KEPT_MAX:])


def write(path: Path, all_of_it: Sequence[Measured]) -> None:
    """Replaces the file; raises as `add` does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_directory(path.parent, 0o700)
        temporary.touch(0o644)  # whatever the umask is
        temporary.write_bytes(msgspec.json.encode(list(all_of_it)))
        temporary.rename(path)
    except OSError as error:
        raise from_oserror("cannot keep what was measured", error, where=str(path)) from error


def forget(path: Path) -> int:
    """Removes the file; returns how many measurements were in it.

    Raises:
        NotPermittedError, SystemCallError: it cannot be removed.
    """
    count = len(read(path))
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise from_oserror("cannot remove the history", error, where=str(path)) from error
    return count
