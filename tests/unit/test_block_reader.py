# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.jobs.whole_blocks over a made-up job: what it reads, maps, and leaves alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from infiniswap.device.jobs import whole_blocks
from infiniswap.device.jobs.whole_blocks import BlockReader, RoomForBlocks
from infiniswap.policy.whole_blocks import WholeBlocks, WholeBlocksConfig
from infiniswap.system import process_memory
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.major_faults import Fault
from infiniswap.system.process_memory import WILL_NEED
from infiniswap.system.swap import SwapArea
from infiniswap.units import MIB, PAGE_BYTES

CONFIG = WholeBlocksConfig()
PAGES = CONFIG.block_bytes // PAGE_BYTES
MINE, OTHER = 10, 11


class Host:
    """A job whose pages are all on the swap device until they are touched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.faults: list[Fault] = []
        self.states: list[str] = []
        self.room = True
        self.asked = 0
        self.kernel_has_advice = True
        self.advised: list[tuple[int, int, int]] = []
        self.touched: list[tuple[int, int]] = []
        self.present: set[tuple[int, int]] = set()
        host = self

        class PageMap:
            def __init__(self, pid: int, start: int, pages: int) -> None:
                self._found = [(pid, start + n * PAGE_BYTES) in host.present for n in range(pages)]

            def swapped(self) -> list[int]:
                return [n for n, found in enumerate(self._found) if not found]

            def is_present(self, page: int) -> bool:
                return self._found[page]

        monkeypatch.setattr(whole_blocks, "PageMap", PageMap)
        monkeypatch.setattr(process_memory, "advise", self.advise)
        monkeypatch.setattr(process_memory, "touch", self.touch)
        self.policy = WholeBlocks(1024 * MIB)
        self.reader = BlockReader(
            self.policy,
            self,  # type: ignore[arg-type]
            lambda: self.now_s,
            self.has_room,
        )

    def has_room(self) -> bool:
        self.asked += 1
        return self.room

    def start(self) -> None:
        self.states.append("started")

    def stop(self) -> None:
        self.states.append("stopped")

    def take(self) -> Iterator[Fault]:
        taken, self.faults = self.faults, []
        yield from taken

    def advise(self, pid: int, start: int, size_bytes: int, advice: int) -> bool:
        assert advice == WILL_NEED
        self.advised.append((pid, start, size_bytes))
        return self.kernel_has_advice

    def touch(self, pid: int, addresses: Sequence[int]) -> int:
        self.touched += [(pid, address) for address in addresses]
        self.present.update(self.touched)
        return len(addresses)

    def fault(self, number: int, pid: int = MINE) -> None:
        """As often in a block as it takes."""
        at = number * CONFIG.block_bytes
        self.faults += [Fault(pid, at + n * PAGE_BYTES) for n in range(CONFIG.faults_min)]

    def look(self) -> None:
        self.now_s += 0.1
        self.reader.look({MINE})

    def prove(self, number: int) -> None:
        """A trial that the job uses."""
        self.fault(number)
        self.look()
        at = number * CONFIG.block_bytes
        self.present.update((MINE, at + n * PAGE_BYTES) for n in range(PAGES))
        self.look()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_a_trial_is_read_and_not_touched(host: Host) -> None:
    host.fault(1)
    host.look()
    assert sum(size for _, _, size in host.advised) == CONFIG.block_bytes
    assert {pid for pid, _, _ in host.advised} == {MINE}
    assert host.touched == []
    assert host.reader.pause_s() < 1


def test_after_a_right_trial_only_what_is_swapped_out_is_mapped(host: Host) -> None:
    host.prove(1)
    here = {(MINE, 2 * CONFIG.block_bytes + n * PAGE_BYTES) for n in range(100)}
    host.present |= here
    host.fault(2)
    host.look()
    assert len(host.touched) == PAGES - 100
    assert not here & set(host.touched)
    assert host.reader.pause_s() == float("inf")


def test_another_process_is_left_alone(host: Host) -> None:
    host.prove(1)
    host.advised.clear()
    host.fault(2, OTHER)
    host.look()
    assert (host.advised, host.touched) == ([], [])


def test_of_many_blocks_at_once_the_rest_is_left_to_later_faults(host: Host) -> None:
    host.prove(1)
    for number in range(2, 40):
        host.fault(number)
    host.look()
    blocks = {address // CONFIG.block_bytes for _, address in host.touched}
    assert 0 < len(blocks) < 10


def test_without_room_nothing_comes_back(host: Host) -> None:
    host.prove(1)
    host.advised.clear()
    host.room, host.asked = False, 0
    for number in range(2, 12):
        host.fault(number)
    host.look()
    assert (host.advised, host.touched) == ([], [])
    assert host.asked == 1  # not for each fault


def test_without_such_advice_nothing_is_ever_mapped(host: Host) -> None:
    host.kernel_has_advice = False
    for number in range(200):
        host.fault(number)
        host.look()
    assert host.touched == []
    assert len(host.advised) < 60  # it rests most of the time


def test_faults_are_not_told_while_it_rests(host: Host) -> None:
    host.reader.look(())
    assert host.states == []
    host.look()
    assert host.states == ["started"]
    while not host.policy.rests(host.now_s):
        host.fault(len(host.advised))
        host.look()
    host.look()
    assert host.states == ["started", "stopped"]
    host.now_s += CONFIG.rest_s_max
    host.look()
    assert host.states[-1] == "started"


def test_a_job_that_has_ended_counts_as_one_that_used_nothing(host: Host) -> None:
    host.fault(1)
    host.look()
    host.now_s += CONFIG.trial_s
    host.reader.look(())
    assert list(host.policy.trials()) == []
    assert host.reader.pause_s() == float("inf")


def area(free_bytes: int) -> SwapArea:
    return SwapArea("/dev/loop0", "partition", 64 * MIB, 64 * MIB - free_bytes, -2)


@pytest.mark.parametrize(
    ("free_mib", "inactive_mib", "swapped_mib", "room"),
    [
        (64, 50, 400, True),
        (1, 64, 100, False),
        (64, 1, 100, False),
        (64, 64, 401, False),  # most of the job is not in memory
        (64, 49, 100, False),  # an eighth of the limit
    ],
)
def test_when_there_is_room(
    free_mib: int,
    inactive_mib: int,
    swapped_mib: int,
    room: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(whole_blocks, "active_areas", lambda: (area(free_mib * MIB),))
    text = f"inactive_anon {inactive_mib * MIB}\nactive_anon {256 * MIB}\n"
    (tmp_path / "memory.stat").write_text(text)
    (tmp_path / "memory.max").write_text(f"{400 * MIB}")
    (tmp_path / "memory.swap.current").write_text(f"{swapped_mib * MIB}")
    found = RoomForBlocks(MemoryCgroup(tmp_path, 2))
    assert not found.is_there()  # nothing is known yet
    assert found.look() is room
    assert found.is_there() is room
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "memory.swap.max").write_text("max")
    assert found.look() is room
    (tmp_path / "memory.swap.max").write_text("1000000")
    assert not found.look()
    assert not found.is_there()


def test_what_changes_fast_is_seen_without_a_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free_mib = 64
    monkeypatch.setattr(whole_blocks, "active_areas", lambda: (area(free_mib * MIB),))
    (tmp_path / "memory.stat").write_text(f"inactive_anon {50 * MIB}\n")
    (tmp_path / "memory.max").write_text(f"{400 * MIB}")
    room = RoomForBlocks(MemoryCgroup(tmp_path, 2))
    assert room.look()
    (tmp_path / "memory.stat").write_text(f"inactive_anon {49 * MIB}\n")
    assert not room.is_there()
    (tmp_path / "memory.stat").write_text(f"inactive_anon {50 * MIB}\n")
    assert room.is_there()
    free_mib = 1
    assert not room.is_there()
