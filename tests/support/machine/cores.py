# SPDX-License-Identifier: Apache-2.0
"""Core files of this host, which all go to one directory for a while."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATTERN = Path("/proc/sys/kernel/core_pattern")


class Cores:
    """Where they go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def of(self, pid: int) -> Path:
        """Of that process; perhaps there is none."""
        return self.directory / f"core.{pid}"


@contextlib.contextmanager
def gathered_cores() -> Iterator[Cores]:
    """Skips where the kernel's setting cannot be changed; it is put back in the end.

    What is started meanwhile has no limit but its own.
    """
    before, limits = _PATTERN.read_text(), resource.getrlimit(resource.RLIMIT_CORE)
    with tempfile.TemporaryDirectory(prefix="isw-cores-", dir="/var/tmp") as directory:
        try:
            _PATTERN.write_text(f"{directory}/core.%p")
        except OSError as error:
            pytest.skip(f"needs to set {_PATTERN}: {error.strerror}")
        resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
        try:
            yield Cores(Path(directory))
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, limits)
            _PATTERN.write_text(before)
