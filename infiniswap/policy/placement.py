# SPDX-License-Identifier: Apache-2.0
"""Which donor gets a slab: the power of two choices.

The paper, section 4.2: the donors are split into M_new, which hold no slab of this device, and
M_old, which do. Two random ones of M_new are asked for their memory use now, and the one that uses
less wins; M_old is asked only when M_new has nothing to give. That spreads a device over many
donors and keeps the load even without any central state.

These objects ask nobody themselves. `Placement.next()` says what the caller has to do, the caller
reports what came of it, and so on until a donor is chosen or none is left:

    placement = Placement(donors, holding, rng)
    while isinstance(step := placement.next(), Ask):
        for donor in step.donors:
            placement.answered(donor, await ask(donor))     # None: unreachable
    if isinstance(step, Choose): try to map; when refused: placement.refused(step.donor), go on
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

CHOICES = 2
"""How many donors are asked at once (the paper's two)."""

Donor = TypeVar("Donor", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A donor's answer about its memory, as of now.

    Attributes:
        used_share: memory in use on that host, slabs it lends included, 0..1.
        slabs_mappable: slabs it could lend at once.
        no_room: why none, in the donor's words; empty where it does not say.
    """

    used_share: float
    slabs_mappable: int
    no_room: str = ""


@dataclass(frozen=True, slots=True)
class Ask(Generic[Donor]):
    """The caller asks these donors for their `MemoryUse` and reports each answer."""

    donors: tuple[Donor, ...]


@dataclass(frozen=True, slots=True)
class Choose(Generic[Donor]):
    """The caller maps the slab there, or reports `refused`."""

    donor: Donor


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No donor has room; `DonorBook` says when to try again."""


class Placement(Generic[Donor]):
    """The search for a donor for one slab.

    Args:
        donors: those that may be asked (see DonorBook.eligible).
        holding: those that already hold a slab of this device (M_old); others are ignored.
        rng: source of randomness.
        choices: how many to ask at once.
    """

    def __init__(
        self,
        donors: Iterable[Donor],
        holding: Collection[Donor],
        rng: Random,
        choices: int = CHOICES,
    ) -> None:
        if choices < 1:
            raise ValueError(f"{choices} choices: at least 1 is needed")
        known = list(dict.fromkeys(donors))
        held = set(holding)
        new = [donor for donor in known if donor not in held]
        old = [donor for donor in known if donor in held]
        rng.shuffle(new)
        rng.shuffle(old)
        self._choices = choices
        self._groups = [group for group in (new, old) if group]
        self._asked: list[Donor] = []
        self._answers: dict[Donor, MemoryUse] = {}

    def next(self) -> Ask[Donor] | Choose[Donor] | Exhausted:
        """The next step. Repeats the same step until it has been reported on."""
        if self._asked:
            return Ask(tuple(self._asked))
        if self._answers:
            order = {donor: place for place, donor in enumerate(self._answers)}
            best = min(self._answers, key=lambda d: (self._answers[d].used_share, order[d]))
            return Choose(best)
        while self._groups:
            group = self._groups[0]
            # One group at a time: a lone member of M_new is not paired with one of M_old,
            # which could then win although M_new had room.
            self._asked = group[: self._choices]
            del group[: self._choices]
            if not group:
                self._groups.pop(0)
            return Ask(tuple(self._asked))
        return Exhausted()

    def answered(self, donor: Donor, use: MemoryUse | None) -> None:
        """Reports an answer; None for a donor that could not be asked.

        Raises:
            ValueError: that donor was not asked.
        """
        if donor not in self._asked:
            raise ValueError(f"{donor!r} was not asked")
        self._asked.remove(donor)
        if use is not None and use.slabs_mappable > 0:
            self._answers[donor] = use

    def refused(self, donor: Donor) -> None:
        """Reports that the chosen donor could not map the slab after all.

        Raises:
            ValueError: that donor was not chosen.
        """
        if self._answers.pop(donor, None) is None:
            raise ValueError(f"{donor!r} was not chosen")


@dataclass(frozen=True, slots=True)
class BackoffConfig:
    """When a donor that failed is asked again, in seconds.

    Attributes:
        unreachable_s: after the first failure; doubles with every further one in a row.
        unreachable_s_max: upper bound of that.
        full_s: after an answer without room.
        distrust_s: after it was given up for what it did; doubles with every further time.
        distrust_s_max: upper bound of that; after so long without a further time it is forgiven.
    """

    unreachable_s: float = 1.0
    unreachable_s_max: float = 30.0
    full_s: float = 2.0
    distrust_s: float = 10.0
    distrust_s_max: float = 3600.0


class DonorBook(Generic[Donor]):
    """Remembers which donors are not worth asking for a while.

    Args:
        config: waiting times.
    """

    def __init__(self, config: BackoffConfig | None = None) -> None:
        self._config = config or BackoffConfig()
        self._retry_s: dict[Donor, float] = {}
        self._failures: dict[Donor, int] = {}
        self._distrusted: dict[Donor, tuple[int, float]] = {}  # how often, when last

    def distrusted(self, donor: Donor, now_s: float) -> float:
        """A donor was given up for what it did; returns for how long, in seconds."""
        config = self._config
        times, last_s = self._distrusted.get(donor, (0, now_s))
        times = 0 if now_s - last_s > config.distrust_s_max else times
        self._distrusted[donor] = (times + 1, now_s)
        wait_s = min(config.distrust_s * 2.0 ** min(times, 32), config.distrust_s_max)
        self._wait_until(donor, now_s + wait_s)
        return wait_s

    def _wait_until(self, donor: Donor, retry_s: float) -> None:
        # A later reason to wait does not shorten an earlier one.
        self._retry_s[donor] = max(retry_s, self._retry_s.get(donor, retry_s))

    def unreachable(self, donor: Donor, now_s: float) -> None:
        """A donor did not answer, or its session ended."""
        failures = self._failures.get(donor, 0)
        self._failures[donor] = failures + 1
        # The exponent is bounded so that a donor away for weeks cannot overflow it.
        wait_s = self._config.unreachable_s * 2.0 ** min(failures, 32)
        self._wait_until(donor, now_s + min(wait_s, self._config.unreachable_s_max))

    def full(self, donor: Donor, now_s: float) -> None:
        """A donor answered that it has no room, refused a slab, or is draining."""
        self._failures.pop(donor, None)
        self._wait_until(donor, now_s + self._config.full_s)

    def good(self, donor: Donor) -> None:
        """A donor answered and has room: nothing against asking it again at once."""
        self._failures.pop(donor, None)
        self._retry_s.pop(donor, None)

    def forget(self, donor: Donor) -> None:
        """The donor is no longer configured."""
        self.good(donor)
        self._distrusted.pop(donor, None)

    def eligible(self, donors: Iterable[Donor], now_s: float) -> list[Donor]:
        """Those of the given donors that may be asked now, in the given order."""
        return [donor for donor in donors if self._retry_s.get(donor, now_s) <= now_s]

    def retry_s(self, donors: Iterable[Donor], now_s: float) -> float | None:
        """Time at which the first of the given donors that must wait may be asked again.

        None when none of them has to wait.
        """
        waiting = [self._retry_s[d] for d in donors if self._retry_s.get(d, now_s) > now_s]
        return min(waiting, default=None)
