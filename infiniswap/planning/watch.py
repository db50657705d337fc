# SPDX-License-Identifier: Apache-2.0
"""Follows the two runs of a plan: the one without a limit, and the one with.

`cli.run` calls `look` about ten times a second while the job runs; True ends the job.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Final

from infiniswap.device.jobs.usage import Summary
from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.planning.misses import Sample
from infiniswap.planning.prediction import Probe
from infiniswap.system import touched
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.units import PAGE_BYTES

_FULL_SHARE: Final = 0.9
"""A window ends when so much of the memory has been used in it."""

_ASKS_S: Final = 5.0
"""For so long without a break a job that wants its user's input is waited for."""

_REST: Final = 20.0
"""At least so many times as long as a look takes: the job waits for some of it."""


class JobWatch:
    """Of one run.

    Attributes:
        user_s: processor time in user mode so far.
        summary: of `run`, when the job has ended; None: the device had gone.
        cut: whether this watch has ended the job.
    """

    def __init__(self) -> None:
        self.user_s = 0.0
        self.summary: Summary | None = None
        self.cut = False
        self._user = touched.UserTime()
        self._began_s = self._asks_since_s = 0.0

    @property
    def at_s(self) -> float:
        """Since the job's start."""
        return time.monotonic() - self._began_s

    def look(self, cgroup: MemoryCgroup) -> bool:
        """Takes the figures of now."""
        if not self._began_s:
            self._began_s = self._asks_since_s = time.monotonic()
        pids = cgroup.pids()
        self.user_s = self._user.add(pids)
        self._check_terminal(pids)
        return False

    def _check_terminal(self, pids: tuple[int, ...]) -> None:
        """Raises UsageError for a job that waits for its user."""
        now_s = time.monotonic()
        if not touched.reads_terminal(pids):
            self._asks_since_s = now_s
        elif now_s - self._asks_since_s >= _ASKS_S:
            raise UsageError(
                "the command waits for input from the terminal, and would wait in each run",
                mend="Give it its input in a file: infiniswap plan -- COMMAND <FILE.",
            )

    def ended(self, summary: Summary) -> None:
        """The job has ended."""
        self.summary = summary


class WholeWatch(JobWatch):
    """Of the run without a limit.

    Attributes:
        samples: what was seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self._window = 0
        self._next_s = 0.0

    def look(self, cgroup: MemoryCgroup) -> bool:
        """Takes a sample, and starts a new window when this one is full."""
        super().look(cgroup)
        if time.monotonic() < self._next_s:
            return False
        busy_s = time.thread_time()  # not what it waited for its turn
        with contextlib.suppress(InfiniswapError):  # the job is ending
            self._sample(cgroup)
        self._next_s = time.monotonic() + _REST * (time.thread_time() - busy_s)
        return False

    def ended(self, summary: Summary) -> None:
        """Raises the highest sample to the peak that was seen between two looks."""
        super().ended(summary)
        if self.samples:
            place = max(range(len(self.samples)), key=lambda at: self.samples[at].used_bytes)
            peak_bytes = max(self.samples[place].used_bytes, summary.anon_peak_bytes)
            self.samples[place] = replace(self.samples[place], used_bytes=peak_bytes)

    def _sample(self, cgroup: MemoryCgroup) -> None:
        pids = cgroup.pids()
        now, memory = touched.touched(pids), cgroup.memory()
        self.samples.append(
            Sample(
                self._window,
                self.at_s,
                self.user_s,
                now.resident_bytes,
                now.referenced_bytes,
                max(0, memory.usage_bytes - memory.file_bytes),
            )
        )
        if now.referenced_bytes >= _FULL_SHARE * now.resident_bytes:
            touched.clear(pids)
            self._window += 1
            self.samples.append(replace(self.samples[-1], window=self._window, referenced_bytes=0))


class LimitedWatch(JobWatch):
    """Of the run with a limit, which ends when its time is up.

    Args:
        limit_bytes: the limit.
        time_s: after so long.
    """

    def __init__(self, limit_bytes: int, time_s: float) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._time_s = time_s
        self._cut_s = 0.0

    def look(self, cgroup: MemoryCgroup) -> bool:
        """True when the time is up."""
        super().look(cgroup)
        self._cut_s = self.at_s
        self.cut = self._cut_s >= self._time_s
        return self.cut

    @property
    def probe(self) -> Probe | None:
        """What was measured; None: nothing."""
        found = self.summary
        if found is None or (found.exit_code and not self.cut):
            return None
        return Probe(
            self._limit_bytes,
            self._cut_s if self.cut else found.elapsed_s,
            self.user_s if self.cut else None,
            found.page_in_bytes // PAGE_BYTES,
            found.page_out_bytes // PAGE_BYTES,
        )
