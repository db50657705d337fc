# SPDX-License-Identifier: Apache-2.0
"""Which parts of a job's memory are brought back in whole, before the job has touched each page.

The kernel reads a page or a few around the address that was touched, and the job waits for each
such read. A job that goes through its columns, or looks up values in them, waits again and again in
the same part of its memory. So a *block* of it that has seen some faults is brought back in one go.

A wrong guess costs a block's transfer, and its pages push others out. Whether guesses are right
cannot be seen of a block that was mapped for the job, since it touches the pages without a fault.
So every so many blocks is a *trial*, which is read but not mapped: the job maps each page when it
needs it. As long as most trials are used, other blocks are brought back in whole; if few are,
nothing is for a while, and for twice as long after the next such failure, as in Leap (Al Maruf and
Chowdhury, ATC 2020), whose window shrinks and grows with its hits.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from infiniswap.policy.ewma import blend
from infiniswap.units import MIB

_UNKNOWN = 0.5
"""Share of right guesses, before anything is known."""


@dataclass(frozen=True, slots=True)
class WholeBlocksConfig:
    """Bounds.

    Attributes:
        block_bytes: what is brought back in one go.
        faults_min: in a block, before it is.
        faults_kept: so many of the last faults count.
        pages_min: fewer pages of a block on the swap device are not worth it.
        trials_max: at a time.
        trial_every: once guesses are right, so many blocks a trial.
        memory_min_bytes: of the job. In less, eight trials would be more than a sixteenth, and
            blocks turn the memory over faster than Linux notices, see `RoomForBlocks` in
            infiniswap.device.jobs.whole_blocks.
        right_share: a trial was right once so much of its pages has been used.
        trial_s: they have so long for that.
        weight: of the newest trial in the average.
        whole_min: share of right trials from which blocks are mapped.
        right_min: below that, nothing is brought back for a while.
        rest_s_min, rest_s_max: how long.
    """

    block_bytes: int = 2 * MIB
    faults_min: int = 12
    faults_kept: int = 512
    pages_min: int = 16
    trials_max: int = 8
    trial_every: int = 8
    memory_min_bytes: int = 256 * MIB
    right_share: float = 0.6
    trial_s: float = 0.5
    weight: float = 0.25
    whole_min: float = 0.55
    right_min: float = 0.33
    rest_s_min: float = 0.25
    rest_s_max: float = 32.0


class Block(NamedTuple):
    """A part of a process's memory.

    Attributes:
        pid: of the process.
        start: its first address.
    """

    pid: int
    start: int


class Guess(NamedTuple):
    """A block that the job is expected to need.

    Attributes:
        block: which.
        is_trial: read it without mapping it, see `WholeBlocks.tried`.
    """

    block: Block
    is_trial: bool


class WholeBlocks:
    """Of one job.

    Args:
        memory_bytes: what the job may have.
        config: bounds.

    Attributes:
        is_of_use: whether this job may ever get any.
    """

    def __init__(self, memory_bytes: int, config: WholeBlocksConfig | None = None) -> None:
        self.config = config or WholeBlocksConfig()
        self.is_of_use = memory_bytes >= self.config.memory_min_bytes
        self._last: deque[Block] = deque()
        self._faults: dict[Block, int] = {}
        self._counted: Counter[Block] = Counter()  # of the last: those that led to a block before
        self._trials: dict[Block, float] = {}
        self._since_trial = 0
        self._right = _UNKNOWN
        self._rest_s = 0.0
        self._rests_until_s = float("-inf")

    def rests(self, now_s: float) -> bool:
        """Whether nothing is brought back now, whatever faults."""
        return not self.is_of_use or now_s < self._rests_until_s

    def faulted(self, pid: int, address: int) -> Guess | None:
        """The job had to wait for a page. Returns what to bring back."""
        block = Block(pid, address - address % self.config.block_bytes)
        if block in self._trials:
            return None  # it is on its way
        self._last.append(block)
        count = self._faults[block] = self._faults.get(block, 0) + 1
        if len(self._last) > self.config.faults_kept:
            self._forget(self._last.popleft())
        if count < self.config.faults_min:
            return None
        is_whole = self._right >= self.config.whole_min
        may_try = len(self._trials) < self.config.trials_max
        if may_try and (not is_whole or self._since_trial >= self.config.trial_every - 1):
            return Guess(block, is_trial=True)
        return Guess(block, is_trial=False) if is_whole else None

    def _forget(self, block: Block) -> None:
        if block in self._counted:  # they are older than those that still count
            self._counted[block] -= 1
            if not self._counted[block]:
                del self._counted[block]
            return
        left = self._faults.get(block, 1) - 1
        if left:
            self._faults[block] = left
        else:
            self._faults.pop(block, None)

    def begin(self, guess: Guess, pages: int, now_s: float) -> bool:
        """Tells how many of the block's pages are on the swap device. Returns whether it is worth
        bringing back, which begins then; its faults count from nothing either way."""
        self._counted[guess.block] += self._faults.pop(guess.block)
        if pages < self.config.pages_min:
            return False
        if guess.is_trial:
            self._trials[guess.block] = now_s
            self._since_trial = 0
        else:
            self._since_trial += 1
        return True

    def trials(self) -> tuple[Block, ...]:
        """Those whose use is to be told, see `tried`."""
        return tuple(self._trials)

    def tried(self, block: Block, share: float, now_s: float) -> bool:
        """So much of a trial's pages has been used so far. Returns whether that decides it."""
        is_right = share >= self.config.right_share
        if not is_right and now_s < self._trials[block] + self.config.trial_s:
            return False
        del self._trials[block]
        self._right = blend(self._right, float(is_right), self.config.weight)
        if is_right:
            self._rest_s = 0.0
        elif self._right < self.config.right_min and not self.rests(now_s):
            self._rest(now_s)
        return True

    def _rest(self, now_s: float) -> None:
        config = self.config
        self._rest_s = min(config.rest_s_max, max(config.rest_s_min, 2 * self._rest_s))
        self._rests_until_s = now_s + self._rest_s
        self._right = _UNKNOWN
        self._last.clear()
        self._faults.clear()
        self._counted.clear()
