# SPDX-License-Identifier: Apache-2.0
"""Which faults befall which host, and when: random, and the same for the same seed.

Pure: the plan does not depend on how fast the machine is. Whoever carries it out may be late, but
keeps the order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

AT_ONCE_MAX = 3
"""Donors with a fault at the same time, but for storms, which take all of them."""

_SINGLE = ("kill", "restart", "freeze", "freeze", "cut", "cut", "delay", "squeeze", "drain")
_PAIRS = (
    ("drain", "kill"),  # in the middle of giving its slabs back
    ("drain", "cut"),
    ("cut", "kill"),  # nobody is told
    ("cut", "freeze"),
    ("squeeze", "cut"),  # it must evict without its consumers
    ("delay", "squeeze"),
    ("delay", "kill"),
)
_STORMS = ("kill", "restart", "freeze", "cut", "drain", "mixed")
_PAIR_SHARE, _STORM_SHARE, _CONSUMER_SHARE = 0.15, 0.05, 0.08
_PAUSE_S = (0.05, 0.9)
_REST_S = 0.5
"""That a host is left alone after a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        number: from 1.
        kinds: one, or two that befall the host together; undone in the reverse order.
        host: its name.
        start_s: on the plan's own clock.
        end_s: when it is undone.
        amount: of a squeeze: the share of the lent slabs that are to be evicted.
        delay_ms: of a delay.
    """

    number: int
    kinds: tuple[str, ...]
    host: str
    start_s: float
    end_s: float
    amount: float
    delay_ms: float

    def __str__(self) -> str:
        text = f"fault {self.number}: {self.host} {' and '.join(self.kinds)}"
        if "squeeze" in self.kinds:
            text += f" {self.amount:.0%} of what it lends"
        if "delay" in self.kinds:
            text += f" by {self.delay_ms:g} ms"
        return f"{text}, for {self.end_s - self.start_s:.2f} s"


def duration_s(kind: str, rng: Random) -> float:
    """Long and short ones alike: both below and above what a donor has to come back."""
    if kind == "restart":
        return 0.0
    low_s, high_s = (0.5, 4.0) if kind in ("squeeze", "drain", "delay") else (0.1, 4.0)
    return math.exp(rng.uniform(math.log(low_s), math.log(high_s)))


class _Busy:
    """Until when hosts have a fault."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def set(self, fault: Fault) -> None:
        self._until_s[fault.host] = fault.end_s + _REST_S

    def now(self, hosts: Sequence[str], now_s: float) -> list[float]:
        """When those of the hosts that are busy will be free."""
        return [end_s for host in hosts if (end_s := self._until_s.get(host, 0.0)) > now_s]

    def free(self, hosts: Sequence[str], now_s: float) -> list[str]:
        return [host for host in hosts if self._until_s.get(host, 0.0) <= now_s]


def faults(rng: Random, donors: Sequence[str], consumers: Sequence[str]) -> Iterator[Fault]:
    """Endlessly many, by their start.

    Args:
        rng: decides everything.
        donors: names of hosts that lend.
        consumers: names of hosts that lose their network now and then.
    """
    busy, now_s, number = _Busy(), 0.0, 0
    while True:
        now_s += rng.uniform(*_PAUSE_S)
        dice = rng.random()
        if dice < _STORM_SHARE:
            now_s = max([now_s, *busy.now(donors, now_s)])
            wanted = _storm(rng, donors)
        elif dice < _STORM_SHARE + _CONSUMER_SHARE:
            now_s = max([now_s, *busy.now(consumers, now_s)])
            wanted = [(("cut",), rng.choice(list(consumers)))]
        else:
            if len(ends := busy.now(donors, now_s)) >= AT_ONCE_MAX:
                now_s = sorted(ends)[-AT_ONCE_MAX]
            host = rng.choice(busy.free(donors, now_s))
            pair = rng.random() < _PAIR_SHARE
            wanted = [(rng.choice(_PAIRS) if pair else (rng.choice(_SINGLE),), host)]
        for kinds, host in wanted:
            number += 1
            length_s = max(duration_s(kind, rng) for kind in kinds)
            amount, delay_ms = rng.uniform(0.2, 1.0), float(rng.randint(1, 60))
            fault = Fault(number, kinds, host, now_s, now_s + length_s, amount, delay_ms)
            busy.set(fault)
            yield fault


def _storm(rng: Random, donors: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """All donors at the same moment."""
    storm = rng.choice(_STORMS)
    if storm == "mixed":
        return [((rng.choice(_SINGLE),), host) for host in donors]
    return [((storm,), host) for host in donors]


class Undo:
    """Faults that have begun, by their end."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Fault]] = []

    def push(self, fault: Fault) -> None:
        """It has begun."""
        heapq.heappush(self._heap, (fault.end_s, fault.number, fault))

    def pop(self, before_s: float) -> Fault | None:
        """The next one that ends by then."""
        if self._heap and self._heap[0][0] <= before_s:
            return heapq.heappop(self._heap)[2]
        return None
