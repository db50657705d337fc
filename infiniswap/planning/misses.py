# SPDX-License-Identifier: Apache-2.0
"""How many pages a job would page in at each memory limit, from one run with a limit.

Least recently used pages go first, so a page that comes back would have stayed with a limit that is
higher by all that went out after it and is still out. That is what it *needs* (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970). Whoever has more memory than that does not
page it in. So a run at one limit tells the page-ins of all higher ones.

A page that came in and was not changed since goes again without a write, which no device sees. The
kernel tells how many pages of this kind are in memory, and how many pages are out: the oldest ones
have gone, or else were changed and have lost their place on the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from infiniswap.system.block_trace import DISCARD, READ, WRITE, PageEvents
from infiniswap.units import PAGE_BYTES

STEPS: Final = 40
"""Of a grid of limits, up to the job's peak."""
_FIRST_SHARE: Final = 0.06
"""Of the peak: what goes out before the kernel knows what is in use. Measured with pandas."""
_SCALE_MAX: Final = 10.0
_SLOPE_STEPS: Final = 7


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a job with a limit.

    Attributes:
        at_ns: when, by CLOCK_MONOTONIC.
        work_s: how much it has done: after so long the job without a limit had come as far.
        limit_bytes: of its memory.
        used_bytes: in memory and swapped out.
        cached_bytes: pages of the swap area that are in memory, too.
        out_bytes: and those that are not.
    """

    at_ns: int
    work_s: float
    limit_bytes: int
    used_bytes: int
    cached_bytes: int
    out_bytes: int


@dataclass(frozen=True, slots=True)
class Miss:
    """A page that was paged in, or several that one stands for.

    Attributes:
        limit_bytes: at that moment.
        needs_bytes: with so much memory it would still have been there.
        weight: how many pages these are.
    """

    limit_bytes: int
    needs_bytes: int
    weight: float


@dataclass(frozen=True, slots=True)
class First:
    """Pages that went out first.

    Attributes:
        gone: how many.
        share: of these, came back.
    """

    gone: int = 0
    share: float = 0.0


class _Order:
    """Positions in order, of which some are taken; counts those after one (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self.count = 0

    def change(self, position: int, by: int) -> None:
        """Takes it (1) or gives it back (-1)."""
        self.count += by
        position += 1
        while position < len(self._tree):
            self._tree[position] += by
            position += position & -position

    def after(self, position: int) -> int:
        """How many are taken behind it."""
        position += 1
        before = 0
        while position > 0:
            before += self._tree[position]
            position &= position - 1
        return self.count - before


class _Pages:
    """Pages of a swap area: out, or in memory and unchanged.

    Args:
        events: at most so many will come.
    """

    def __init__(self, events: int) -> None:
        self._order = _Order(2 * events)
        self._next = 0
        self._out: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    def correct(self, cached: int, out: int) -> None:
        """So many are really in memory and unchanged, and so many are out."""
        while len(self._cached) > cached:
            page, _ = self._cached.popitem(last=False)
            if self._order.count < out:
                self._goes(page)

    def read(self, page: int) -> int:
        """It comes in; returns how many that are out went after it."""
        position = self._out.get(page)
        after = 0 if position is None else self._order.after(position)
        self.discarded(page)
        self._cached[page] = None
        return after

    def written(self, page: int) -> None:
        """It goes out."""
        self.discarded(page)
        self._goes(page)

    def discarded(self, page: int) -> None:
        """Nothing needs it."""
        position = self._out.pop(page, None)
        if position is not None:
            self._order.change(position, -1)
        self._cached.pop(page, None)

    def _goes(self, page: int) -> None:
        self._out[page] = self._next
        self._order.change(self._next, 1)
        self._next += 1


def misses(events: PageEvents, looks: Sequence[Look]) -> Iterator[Miss]:
    """The pages that a job paged in.

    Args:
        events: of the swap device, while the job ran.
        looks: in order; pages before the first one are left out.
    """
    pages = _Pages(len(events.pages))
    times = [look.at_ns for look in looks]
    each_bytes = PAGE_BYTES * events.every
    for at_ns, kind, page in zip(events.at_ns, events.kinds, events.pages, strict=True):
        at = bisect_right(times, at_ns)
        if not at:
            continue
        look = looks[at - 1]
        pages.correct(look.cached_bytes // each_bytes, look.out_bytes // each_bytes)
        if kind == READ:
            needs_bytes = look.limit_bytes + (pages.read(page) + 1) * each_bytes
            yield Miss(look.limit_bytes, needs_bytes, events.every)
        elif kind == DISCARD:
            pages.discarded(page)
        else:
            pages.written(page)


class Curve:
    """Page-ins against the limit, of a run whose limit was changed meanwhile.

    Page-ins are told apart by what they need, in steps up to the peak. Those of a step are seen
    only while the limit is below it, so they are scaled from the work that the job did then to all
    the work that it did with more memory in use than that. What comes back while there is no limit
    does not count: that part of the run saw nothing. Below the lowest limit of the run the
    curve goes on as steeply as it came there.

    Where memory runs out for the first time, the kernel does not know yet what is in use, and pages
    out what the job has had for longest. As many of these pages come back as of the first ones of
    this run.

    Args:
        found: the page-ins.
        looks: at the run, in order.
        peak_bytes: of the job: with so much nothing is paged in.
        first: pages that went out first.
        scaled: False counts the page-ins that were seen, and no others.
    """

    def __init__(
        self,
        found: Iterable[Miss],
        looks: Sequence[Look],
        peak_bytes: int,
        first: First = First(),
        *,
        scaled: bool = True,
    ) -> None:
        self._peak_bytes = peak_bytes
        self._first = first
        self._step_bytes = step_bytes(peak_bytes)
        seen = [0.0] * STEPS
        for miss in found:
            if miss.limit_bytes < peak_bytes:
                # Under its own limit it came in, however little more it needs.
                limit_step = -(-miss.limit_bytes // self._step_bytes)
                step = max(limit_step, (miss.needs_bytes - 1) // self._step_bytes)
                seen[min(STEPS - 1, step)] += miss.weight
        scales = [self._scale(looks, step * self._step_bytes) for step in range(STEPS)]
        if not scaled:
            scales = [min(1.0, scale) for scale in scales]
        lowest = next((step for step, scale in enumerate(scales) if scale), STEPS)
        pages = [count * scale for count, scale in zip(seen, scales, strict=True)]
        near = pages[lowest : lowest + _SLOPE_STEPS]
        pages[:lowest] = [sum(near) / len(near) if near else 0.0] * lowest
        self._pages = [sum(pages[step:]) for step in range(STEPS + 1)]

    @staticmethod
    def _scale(looks: Sequence[Look], needs_bytes: int) -> float:
        """All the work in which pages may need that much, by what was seen of it; 0: no look."""
        all_s = seen_s = 0.0
        is_seen = False
        for before, now in pairwise(looks):
            if now.used_bytes > needs_bytes:
                work_s = now.work_s - before.work_s
                all_s += work_s
                if before.limit_bytes <= needs_bytes:
                    is_seen = True
                    seen_s += work_s
        if not is_seen:
            return 0.0
        if not all_s:  # too little processor time for the kernel's clock
            return 1.0
        return min(_SCALE_MAX, all_s / seen_s) if seen_s > 0 else _SCALE_MAX

    def at(self, limit_bytes: int) -> float:
        """Page-ins under the limit, between those of the grid in proportion."""
        if limit_bytes >= self._peak_bytes:
            return 0.0
        low, within_bytes = divmod(limit_bytes, self._step_bytes)
        here, above = self._pages[low : low + 2]
        first = min(self._first.gone, (self._peak_bytes - limit_bytes) / PAGE_BYTES)
        return max(
            here + (above - here) * within_bytes / self._step_bytes,
            self._first.share * first,
        )


def first_of(events: PageEvents, peak_bytes: int) -> First:
    """The pages that went out before the kernel knew what is in use."""
    most = int(_FIRST_SHARE * peak_bytes / PAGE_BYTES / events.every)
    waiting: set[int] = set()
    gone = back = 0
    for kind, page in zip(events.kinds, events.pages, strict=True):
        back += kind == READ and page in waiting
        waiting.discard(page)
        if kind == WRITE and gone < most:
            waiting.add(page)
            gone += 1
    return First(gone * events.every, back / gone if gone else 0.0)


def step_bytes(peak_bytes: int) -> int:
    """Of the grid of limits, in whole pages."""
    return max(1, -(-peak_bytes // STEPS // PAGE_BYTES)) * PAGE_BYTES
