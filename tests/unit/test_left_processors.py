# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.left_processors over a made-up /proc: which processes and threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from infiniswap.system.left_processors import LeftProcessors, is_needed


@pytest.mark.parametrize(
    ("machine", "release", "needed"),
    [
        ("x86_64", "6.12.94+deb13-amd64", False),
        ("x86_64", "6.13.0", True),
        ("x86_64", "6.18.44-fc", True),
        ("x86_64", "7.0.0-rc1", True),
        ("x86_64", "5.10.0-8-amd64", False),
        ("aarch64", "6.18.0", False),
        ("x86_64", "unknown", False),
    ],
)
def test_which_kernels_keep_them(machine: str, release: str, needed: bool) -> None:
    assert is_needed(machine, release) is needed


class Host:
    """Threads with the processor time that a test gives them."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.marked: list[tuple[int, int]] = []
        self.has_block = True
        self.refused: set[int] = set()
        self.left = LeftProcessors(proc=proc, mark=self.mark)

    def mark(self, pid: int, tid: int) -> bool:
        if pid in self.refused:
            raise PermissionError
        self.marked.append((pid, tid))
        return self.has_block

    def ran(self, pid: int, tid: int, ticks: int) -> None:
        """The thread, and its process with it, has run for so long in all."""
        process = self.proc / str(pid)
        (process / "task" / str(tid)).mkdir(parents=True, exist_ok=True)
        for stat in (process / "task" / str(tid) / "stat", process / "stat"):
            fields = ["S", *["0"] * 10, str(ticks - ticks // 3), str(ticks // 3), *["0"] * 30]
            stat.write_text(f"{tid} (a ) b) {' '.join(fields)}\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_thread_that_ran_longest_since_the_last_call(host: Host) -> None:
    host.ran(10, 11, 30)
    host.ran(10, 10, 500)
    assert host.left.strike_off([10]) == 1
    assert host.marked == [(10, 10)]
    host.ran(10, 11, 40)
    host.ran(10, 10, 505)
    assert host.left.strike_off([10]) == 1
    assert host.marked[1:] == [(10, 11)]


def test_a_process_that_has_not_run_is_left_alone(host: Host) -> None:
    host.ran(10, 10, 5)
    host.ran(20, 20, 5)
    host.left.strike_off([10, 20])
    host.marked.clear()
    host.ran(20, 20, 6)
    assert host.left.strike_off([10, 20]) == 1
    assert host.marked == [(20, 20)]


def test_a_process_that_ended_does_not_keep_the_others_from_it(host: Host) -> None:
    host.ran(20, 20, 5)
    assert host.left.strike_off([10, 20]) == 1


def test_a_thread_without_a_control_block_does_not_count(host: Host) -> None:
    host.ran(10, 10, 5)
    host.has_block = False
    assert host.left.strike_off([10]) == 0
    assert host.marked == [(10, 10)]


def test_a_pid_that_came_again_is_not_compared_with_the_old_one(host: Host) -> None:
    host.ran(10, 10, 500)
    host.left.strike_off([10])
    host.left.strike_off([])
    host.ran(10, 10, 3)
    host.marked.clear()
    assert host.left.strike_off([10]) == 1


def test_one_process_that_is_refused_does_not_keep_the_others_from_it(host: Host) -> None:
    host.ran(10, 10, 5)
    host.ran(20, 20, 5)
    host.refused = {10}
    assert host.left.strike_off([10, 20]) == 1
    host.ran(10, 10, 9)
    with pytest.raises(PermissionError):
        host.left.strike_off([10])
