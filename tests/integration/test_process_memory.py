# SPDX-License-Identifier: Apache-2.0
"""Pages of another process: found, read and mapped for it, on the real kernel."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from infiniswap.system.process_memory import COLD, PageMap, advise, touch
from infiniswap.units import PAGE_BYTES

PAGES = 64

HOLDER = f"""
import ctypes, mmap, sys
memory = mmap.mmap(-1, {PAGES * PAGE_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(0, {PAGES}, 2):
    memory[page * {PAGE_BYTES}] = 1
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.readline()
"""

STRANGER = """
import os, sys
from infiniswap.system.process_memory import COLD, advise, touch
pid, start = map(int, sys.argv[1:])
os.setresuid(65534, 65534, 65534)
for act in (lambda: touch(pid, [start]), lambda: advise(pid, start, 4096, COLD)):
    try:
        act()
    except PermissionError:
        print("refused")
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def holder() -> Iterator[tuple[int, int]]:
    """A process with every second page of a range in memory: its pid, and where that is."""
    argv = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate(b"\n", timeout=60)


def present(pid: int, start: int) -> list[int]:
    pages = PageMap(pid, start, PAGES)
    assert pages.swapped() == []
    return [page for page in range(PAGES) if pages.is_present(page)]


def test_touched_pages_are_there_without_a_fault_of_their_process(holder: tuple[int, int]) -> None:
    pid, start = holder
    assert present(pid, start) == list(range(0, PAGES, 2))
    assert touch(pid, [start + page * PAGE_BYTES for page in (1, 5)]) == 2
    assert present(pid, start) == sorted({*range(0, PAGES, 2), 1, 5})


def test_a_touch_ends_where_nothing_is(holder: tuple[int, int]) -> None:
    pid, start = holder
    assert touch(pid, [start, 0, start + PAGE_BYTES]) == 1
    assert touch(pid, [0]) == 0


def test_advice_about_a_range(holder: tuple[int, int]) -> None:
    pid, start = holder
    assert advise(pid, start, PAGES * PAGE_BYTES, COLD)
    assert not advise(pid, 0, PAGE_BYTES, COLD)


def test_a_process_that_has_ended_has_no_pages() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert PageMap(process.pid, mmap.PAGESIZE, PAGES).swapped() == []
    assert touch(process.pid, [mmap.PAGESIZE]) == 0
    assert not advise(process.pid, mmap.PAGESIZE, PAGE_BYTES, COLD)


def test_without_the_rights_it_is_refused(holder: tuple[int, int]) -> None:
    pid, start = holder
    argv = [sys.executable, "-c", STRANGER, str(pid), str(start)]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "refused\n" * 2
