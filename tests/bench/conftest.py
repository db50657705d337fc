# SPDX-License-Identifier: Apache-2.0
"""Where the benchmarks under test build, how they are run, and what they must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.benchmarks import Runner, work_directory


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, built once."""
    return tmp_path_factory.mktemp("bench-build")


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory on disk for runs; nothing may be in it at the end."""
    with work_directory() as directory:
        yield directory


@pytest.fixture
def runner(project_root: Path, build: Path, work: Path) -> Runner:
    """Runs benchmarks."""
    return Runner(project_root, build, work)
