# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.extents."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from infiniswap.system.extents import allocated_bytes
from infiniswap.units import KIB, MIB


def test_more_extents_than_one_question_takes_are_all_counted(tmp_path: Path) -> None:
    file, number = tmp_path / "image", 600
    with file.open("wb") as image:
        for at in range(number):
            os.pwrite(image.fileno(), bytes(64 * KIB), at * 128 * KIB)
        os.fsync(image.fileno())
    assert allocated_bytes(file, file.stat(), number * 128 * KIB) == number * 64 * KIB


def test_only_what_lies_before_the_end_counts(tmp_path: Path) -> None:
    file = tmp_path / "image"
    with file.open("wb") as image:
        os.posix_fallocate(image.fileno(), 0, 2 * MIB)
    assert allocated_bytes(file, file.stat(), MIB) == MIB


def test_where_the_file_system_does_not_tell_all_blocks_count() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as image:  # tmpfs
        image.write(bytes(MIB))
        image.flush()
        assert allocated_bytes(Path(image.name), os.stat(image.fileno()), 2 * MIB) == MIB
