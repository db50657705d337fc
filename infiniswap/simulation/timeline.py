# SPDX-License-Identifier: Apache-2.0
"""What is to happen at which moment of virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Calls that are due at a time; those of one moment in the order in which they were put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Calls at that time, with it."""
        heapq.heappush(self._heap, (time_s, next(self._order), call))

    def run(self, until_s: float) -> None:
        """Makes every call that is due by then, those that these put included."""
        while self._heap and self._heap[0][0] <= until_s:
            time_s, _, call = heapq.heappop(self._heap)
            call(time_s)
