# SPDX-License-Identifier: Apache-2.0
"""Which of a job's memory goes first, where there is far memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from infiniswap.cli.run.files_first import FilesFirst
from infiniswap.system.cgroup import FILES_FIRST, SWAPPINESS, MemoryCgroup
from infiniswap.units import MIB


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def swappiness(path: Path) -> int:
    return int((path / "memory.swappiness").read_text())


def test_files_go_first_while_more_is_far_than_in_swap(tmp_path: Path, clock: list[float]) -> None:
    (tmp_path / "memory.swappiness").write_text(str(SWAPPINESS))
    files = FilesFirst(MemoryCgroup(tmp_path, 1), wanted=True)
    assert swappiness(tmp_path) == FILES_FIRST
    files.look(0, 100 * MIB)
    clock[0] += 1.5  # the device has not been asked since
    files.look(50 * MIB, 100 * MIB)
    clock[0] += 1.5
    files.look(0, 100 * MIB)
    assert swappiness(tmp_path) == FILES_FIRST
    clock[0] += 2.5
    files.look(0, 60 * MIB)
    assert swappiness(tmp_path) == FILES_FIRST
    clock[0] += 2.5
    files.look(0, 100 * MIB)
    assert swappiness(tmp_path) == SWAPPINESS
    clock[0] += 2.5
    files.look(50 * MIB, 100 * MIB)
    assert swappiness(tmp_path) == FILES_FIRST


@pytest.mark.parametrize(("version", "wanted"), [(2, True), (1, False)])
def test_other_jobs_stay_as_they_are(
    tmp_path: Path, clock: list[float], version: int, wanted: bool
) -> None:
    (tmp_path / "memory.swappiness").write_text("60")
    files = FilesFirst(MemoryCgroup(tmp_path, version), wanted=wanted)
    clock[0] += 5
    files.look(0, 100 * MIB)
    assert swappiness(tmp_path) == 60


def test_on_version_2_the_jobs_user_may_reclaim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda *its: given.append(its))
    MemoryCgroup(tmp_path, 1).allow_reclaim(1000)
    assert given == []
    MemoryCgroup(tmp_path, 2).allow_reclaim(1000)
    assert given == [(tmp_path / "memory.reclaim", 1000, -1)]
    monkeypatch.undo()
    MemoryCgroup(tmp_path, 2).allow_reclaim(os.getuid())  # before Linux 5.19 there is none
