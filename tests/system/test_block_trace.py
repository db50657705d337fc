# SPDX-License-Identifier: Apache-2.0
"""A trace of a block device tells each page that was written, read and discarded, and no other
device's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from infiniswap.errors import InfiniswapError
from infiniswap.system import block_trace, loop
from infiniswap.system.block_trace import DISCARD, READ, WRITE, BlockTrace, _Event
from infiniswap.units import MIB, PAGE_BYTES


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    """Two loop devices."""
    with ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            file = tmp_path / name
            file.touch()
            os.truncate(file, 4 * MIB)
            device = loop.attach(file)
            stack.callback(loop.detach, device)
            found.append(Path(device.path))
        yield found


def _copy(source: str, target: str, *options: str) -> None:
    argv = ["dd", f"if={source}", f"of={target}", "bs=8k", "status=none", *options]
    subprocess.run(argv, check=True, timeout=60)


def test_each_page_is_told_and_no_other_device(devices: list[Path]) -> None:
    mine, other = devices
    with BlockTrace(mine.stat().st_rdev) as trace:
        _copy("/dev/zero", str(mine), "seek=2", "count=3", "oflag=direct")
        _copy("/dev/zero", str(other), "count=5", "oflag=direct")
        _copy(str(mine), "/dev/null", "skip=3", "count=1", "iflag=direct")
        argv = ["blkdiscard", "--offset", str(9 * PAGE_BYTES), "--length", str(PAGE_BYTES)]
        subprocess.run([*argv, str(mine)], check=True, timeout=60)
    found = trace.events()
    assert found.lost == 0
    assert list(found.at_ns) == sorted(found.at_ns)
    told = list(zip(found.kinds, found.pages, strict=True))
    assert [page for kind, page in told if kind == WRITE] == list(range(4, 10))
    assert [page for kind, page in told if kind == DISCARD] == [9]
    # Other programs may look at a device that was written to.
    assert {(READ, 6), (READ, 7)} <= set(told)


def test_a_discard_on_another_processor_than_the_write_is_told(
    devices: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each processor has a ring of its own, and they are read one after the other."""
    monkeypatch.setattr(block_trace, "_DRAIN_S", 60.0)  # all of it at once
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    mine, _ = devices
    write = ["dd", "if=/dev/zero", f"of={mine}", "bs=4k", "count=2", "oflag=direct", "status=none"]
    discard = ["blkdiscard", "--length", str(PAGE_BYTES), str(mine)]
    with BlockTrace(mine.stat().st_rdev) as trace:
        subprocess.run(["taskset", "-c", str(last), *write], check=True, timeout=60)
        subprocess.run(["taskset", "-c", str(first), *discard], check=True, timeout=60)
    found = trace.events()
    told = list(zip(found.kinds, found.pages, strict=True))
    assert [page for kind, page in told if kind == DISCARD] == [0]


def test_more_than_a_ring_holds_is_told_too(devices: list[Path]) -> None:
    mine, _ = devices
    with BlockTrace(mine.stat().st_rdev) as trace:
        for _ in range(20):
            _copy("/dev/zero", str(mine), "count=512", "oflag=direct")
    assert len(trace.events().pages) == 20 * 1024


def test_of_very_many_every_other_block_stands_for_all(
    devices: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = devices
    monkeypatch.setattr("infiniswap.system.block_trace._EVENTS_MAX", 700)
    with BlockTrace(mine.stat().st_rdev) as trace:
        _copy("/dev/zero", str(mine), "count=512", "oflag=direct")
        subprocess.run(["blkdiscard", str(mine)], check=True, timeout=60)
    found = trace.events()
    written = [page for kind, page in zip(found.kinds, found.pages, strict=True) if kind == WRITE]
    gone = [page for kind, page in zip(found.kinds, found.pages, strict=True) if kind == DISCARD]
    assert found.every > 1
    assert written == [page for page in range(1024) if page // 16 % found.every == 0]
    assert sorted(gone) == written


def test_the_kernel_leaves_out_what_does_not_count(
    devices: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = devices
    monkeypatch.setattr(block_trace, "_EVENTS_MAX", 700)
    seen: list[int] = []
    keep = BlockTrace._keep

    def counted(trace: BlockTrace, events: Sequence[_Event]) -> None:
        seen.extend(event.kind for event in events)
        keep(trace, events)

    monkeypatch.setattr(BlockTrace, "_keep", counted)
    with BlockTrace(mine.stat().st_rdev) as trace:
        _copy("/dev/zero", str(mine), "count=512", "oflag=direct")
        end_s = time.monotonic() + 60
        while trace._every == 1 and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(5 * block_trace._DRAIN_S)
        trace._events_max = 9999
        first = len(seen)
        _copy("/dev/zero", str(mine), "count=512", "oflag=direct")  # two pages each
        _copy("/dev/zero", str(mine), "bs=256k", "seek=1", "count=1", "oflag=direct")
        argv = ["blkdiscard", "--offset", str(17 * PAGE_BYTES), "--length", str(64 * PAGE_BYTES)]
        subprocess.run([*argv, str(mine)], check=True, timeout=60)
    found = trace.events()
    second = seen[first:]
    assert found.every == 2
    assert second.count(WRITE) == 512 // 2 + 1  # and what is longer than a block of pages
    assert second.count(DISCARD) == 1
    told = list(zip(found.kinds, found.pages, strict=True))
    gone = [page for kind, page in told if kind == DISCARD]
    assert gone == [page for page in range(17, 81) if page // 16 % 2 == 0]
    kept = [page for page in range(1024) if page // 16 % 2 == 0]
    assert sum(kind == WRITE for kind, _ in told) == 2 * len(kept) + 32


def test_few_blocks_that_are_used_again_and_again_are_told_all(
    devices: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = devices
    monkeypatch.setattr(block_trace, "_EVENTS_MAX", 100)
    with BlockTrace(mine.stat().st_rdev) as trace:
        for _ in range(60):
            _copy("/dev/zero", str(mine), "count=8", "oflag=direct")
    found = trace.events()
    assert found.every == 1
    assert sum(kind == WRITE for kind in found.kinds) == 60 * 16


def test_a_signal_does_not_come_to_the_reader_of_a_trace(devices: list[Path]) -> None:
    code = f"""
import os, signal
from infiniswap.system.block_trace import BlockTrace
caught = []
signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
with BlockTrace({devices[0].stat().st_rdev}):
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
    os.kill(os.getpid(), signal.SIGUSR1)
    print(signal.SIGUSR1 in signal.sigpending())  # nobody else has taken it
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
print(caught == [signal.SIGUSR1])
"""  # a process of its own: in pytest's, threads of numpy's and others' would take the signal
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "True"]


def test_who_may_not_trace_is_told(devices: list[Path]) -> None:
    code = f"""
import os
from infiniswap.errors import InfiniswapError
from infiniswap.system.block_trace import BlockTrace
os.setuid(65534)
try:
    BlockTrace({devices[0].stat().st_rdev}).__enter__()
except InfiniswapError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def test_nothing_is_left_of_a_trace(devices: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InfiniswapError), BlockTrace(devices[0].stat().st_rdev) as trace:
        raise InfiniswapError("an end in the middle")
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(trace.events().pages) == []
