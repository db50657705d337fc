# SPDX-License-Identifier: Apache-2.0
"""A job that chooses its processors, and looks all the time whether it still has them.

Run as a script: python affinity_job.py keep|change|inherit. It pages, as it has twice a run's local
memory. With `keep` its first thread has one processor and a second thread another; with `change`
the first thread chooses others again and again; with `inherit` it sets none. It prints a line with
its threads. At the end of its standard input it prints how often it looked, and how often it saw
processors that it had not chosen.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import threading
from collections.abc import Callable

SIZE_BYTES = 64 << 20
PAGES_A_LOOK = 64


class Worker:
    """A thread's part of the memory, and what it saw."""

    def __init__(self, memory: mmap.mmap, ended: Callable[[], bool]) -> None:
        self._memory = memory
        self._ended = ended
        self._at = 0
        self.looks = 0
        self.foreign = 0

    def work(self, choices: list[set[int]]) -> None:
        """Takes the choices in turn, one for each look."""
        while not self._ended():
            for processors in choices:
                if len(choices) > 1:
                    os.sched_setaffinity(0, processors)
                self._touch()
                self.looks += 1
                self.foreign += os.sched_getaffinity(0) != processors

    def _touch(self) -> None:
        for _ in range(PAGES_A_LOOK):
            self._memory[self._at] = 1
            self._at = (self._at + mmap.PAGESIZE) % len(self._memory)


def memory_of(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def main(what: str) -> None:
    processors = sorted(os.sched_getaffinity(0))
    home, away = {processors[0]}, {processors[-1]}
    is_over = threading.Event()

    def ended() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    first = Worker(memory_of(SIZE_BYTES), ended)
    second = Worker(memory_of(SIZE_BYTES // 4), is_over.is_set)
    ready = threading.Event()
    threads: dict[str, int] = {"first": os.getpid()}

    def other() -> None:
        os.sched_setaffinity(0, away)
        threads["second"] = threading.get_native_id()
        ready.set()
        second.work([away])

    thread = threading.Thread(target=other)
    if what == "keep":
        thread.start()
        ready.wait()
        os.sched_setaffinity(0, home)
    print(json.dumps(threads), flush=True)
    choices = {"keep": [home], "change": [home, away, home | away], "inherit": [set(processors)]}
    first.work(choices[what])
    is_over.set()
    if what == "keep":
        thread.join()
    print(json.dumps({"looks": first.looks, "foreign": first.foreign + second.foreign}))


if __name__ == "__main__":
    main(sys.argv[1])
