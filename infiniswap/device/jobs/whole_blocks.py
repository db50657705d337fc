# SPDX-License-Identifier: Apache-2.0
"""Brings parts of a job's memory back in whole, as infiniswap.policy.whole_blocks says.

A part of the attendant: what it calls waits for pages and for locks on the job's memory, and pages
others of the job out to make room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from infiniswap.policy.whole_blocks import Block, Guess, WholeBlocks
from infiniswap.system import process_memory
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.major_faults import Fault, MajorFaults
from infiniswap.system.memory import has_swap_limit, inactive_bytes
from infiniswap.system.process_memory import WILL_NEED, PageMap
from infiniswap.system.swap import active_areas
from infiniswap.units import MIB, PAGE_BYTES

_STEP_PAGES: Final = 128
"""Of one call: the job's own mmap(2) waits for it."""
_LOOKED_AT: Final = 64
"""Pages of a trial, spread over it: as good as all."""
_TRIAL_S: Final = 0.1
"""How often to look which pages of trials were used."""
_GUESSES_MAX: Final = 8
"""Of one look. The job has gone on meanwhile: what it needs now, later faults tell."""
_BYTES_MIN: Final = 16 * MIB


class RoomForBlocks:
    """Whether a job's memory has room for blocks that it may need.

    Most of the job must be in memory: the less of it is, the sooner it needs those pages that a
    block pushes out. There must be swap for those, and no limit on it. And the kernel must have
    pages at hand that were not used lately: Linux decides by sums that may be four seconds old
    whether it looks for more (mm/vmscan.c: inactive_is_low). When it has none, and the sums do not
    show it, it ends the job. Asking for them here refreshes the sums.

    Args:
        cgroup: of the job.
    """

    def __init__(self, cgroup: MemoryCgroup) -> None:
        self._cgroup = cgroup
        self._inactive_min: int | None = None

    def look(self) -> bool:
        """Reads what changes slowly, such as limits; returns `is_there`.

        Raises:
            InfiniswapError: the cgroup is gone.
        """
        cgroup, memory = self._cgroup, self._cgroup.memory()
        limit_bytes, self._inactive_min = memory.limit_bytes, None
        if limit_bytes is None or (memory.swap_bytes or 0) > limit_bytes:
            return False
        if has_swap_limit(cgroup.path, cgroup.version):
            return False
        self._inactive_min = max(_BYTES_MIN, limit_bytes // 8)
        return self.is_there()

    def is_there(self) -> bool:
        """Whether there is room at this moment, with the limits that `look` has seen.

        Raises:
            InfiniswapError: the cgroup is gone.
        """
        if self._inactive_min is None:
            return False
        free_bytes = sum(area.size_bytes - area.used_bytes for area in active_areas())
        inactive = inactive_bytes(self._cgroup.path, self._cgroup.version)
        return free_bytes >= _BYTES_MIN and inactive >= self._inactive_min


class BlockReader:
    """Of one job.

    Args:
        policy: decides.
        faults: of this host.
        clock: seconds, monotonic.
        has_room: see RoomForBlocks.is_there(); asked for each block.
    """

    def __init__(
        self,
        policy: WholeBlocks,
        faults: MajorFaults,
        clock: Callable[[], float],
        has_room: Callable[[], bool],
    ) -> None:
        self._policy = policy
        self._faults = faults
        self._clock = clock
        self._has_room = has_room
        self._tried: dict[Block, list[int]] = {}
        self._told_s = float("-inf")
        self._is_started = False

    def pause_s(self) -> float:
        """When to look again even if no fault has come."""
        return _TRIAL_S if self._tried else float("inf")

    def look(self, pids: Collection[int]) -> None:
        """Goes by the faults since the last time, of these processes; without any it rests.

        Raises:
            PermissionError: it is not allowed, see infiniswap.system.process_memory.
        """
        rests = not pids or self._policy.rests(self._clock())
        if rests == self._is_started:
            self._is_started = not rests
            (self._faults.stop if rests else self._faults.start)()
        faults = list(self._faults.take())
        if not rests:
            self._follow(fault for fault in faults if fault.pid in pids)
        self._tell_use()

    def _follow(self, faults: Iterable[Fault]) -> None:
        left = _GUESSES_MAX
        for fault in faults:
            guess = self._policy.faulted(fault.pid, fault.address)
            if guess is None:
                continue
            if not left or not self._has_room():
                return
            left -= self._bring_back(guess)

    def _pages(self, block: Block) -> PageMap:
        return PageMap(block.pid, block.start, self._policy.config.block_bytes // PAGE_BYTES)

    def _bring_back(self, guess: Guess) -> bool:
        block, swapped = guess.block, self._pages(guess.block).swapped()
        if not self._policy.begin(guess, len(swapped), self._clock()):
            return False
        for first in range(swapped[0], swapped[-1] + 1, _STEP_PAGES):
            pages = min(_STEP_PAGES, swapped[-1] + 1 - first)
            start = block.start + first * PAGE_BYTES
            if not process_memory.advise(block.pid, start, pages * PAGE_BYTES, WILL_NEED):
                break  # the process has ended, or Linux is older than 5.15
        if guess.is_trial:
            self._tried[block] = swapped[:: max(1, len(swapped) // _LOOKED_AT)]
        else:
            process_memory.touch(block.pid, [block.start + page * PAGE_BYTES for page in swapped])
        return True

    def _tell_use(self) -> None:
        now_s = self._clock()
        if now_s < self._told_s + _TRIAL_S:
            return
        self._told_s = now_s
        for block in self._policy.trials():
            pages, now = self._tried[block], self._pages(block)
            share = sum(map(now.is_present, pages)) / len(pages)
            if self._policy.tried(block, share, now_s):
                del self._tried[block]
