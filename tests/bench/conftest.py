# SPDX-License-Identifier: Apache-2.0
"""Where the benchmarks under test build, how they are run, and what they must not leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from isw_bench import scope
from support.benchmarks import Runner

from infiniswap.system import loop, mounts, swap


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, built once."""
    return tmp_path_factory.mktemp("bench-build")


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory on disk for runs; nothing may be in it at the end."""
    directory = Path(f"/var/tmp/isw-bench-test-{os.getpid()}")
    directory.mkdir()
    yield directory
    left = sorted(directory.iterdir())
    for path in left:
        scope.sweep(path)
    directory.rmdir()
    assert not left
    assert not [device for device in loop.attached() if str(directory) in device.backing]
    assert not [mount for mount in mounts.mounts() if str(directory) in mount.mount_point]
    assert not [area for area in swap.active_areas() if str(directory) in area.path]


@pytest.fixture
def runner(project_root: Path, build: Path, work: Path) -> Runner:
    """Runs benchmarks."""
    return Runner(project_root, build, work)
