# SPDX-License-Identifier: Apache-2.0
"""How long the threads of this process have run, and have waited for a processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infiniswap.system.files import PROC, try_read_text


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """Of one thread, since it was made.

    Attributes:
        ran_ns: on a processor.
        waited_ns: ready to run, while none was free.
    """

    ran_ns: int
    waited_ns: int


def thread_times(*, proc: Path = PROC) -> dict[int, ThreadTime]:
    """The times of this process's threads, by thread; empty where the kernel does not tell.

    https://docs.kernel.org/scheduler/sched-stats.html: /proc/PID/schedstat, of each thread here.
    """
    task = proc / "self" / "task"
    try:
        threads = os.listdir(task)
    except OSError:
        return {}
    times = {}
    for thread in threads:
        fields = (try_read_text(task / thread / "schedstat") or "").split()
        if len(fields) >= 2 and fields[0].isdecimal() and fields[1].isdecimal():
            times[int(thread)] = ThreadTime(int(fields[0]), int(fields[1]))
    return times


def between(before: Mapping[int, ThreadTime], now: Mapping[int, ThreadTime]) -> ThreadTime:
    """What these threads have run and waited in between; those that have ended are left out."""
    nothing = ThreadTime(0, 0)
    pairs = [(before.get(thread, nothing), time) for thread, time in now.items()]
    return ThreadTime(
        sum(time.ran_ns - old.ran_ns for old, time in pairs),
        sum(time.waited_ns - old.waited_ns for old, time in pairs),
    )
