# SPDX-License-Identifier: Apache-2.0
"""Which donor gets a slab: the power of two choices.

The paper, section 4.2: the donors are split into M_new, which hold no slab of this device, and
M_old, which do. Two random ones of M_new are asked for their memory use now, and the one that uses
less wins; M_old is asked only when M_new has nothing to give. That spreads a device over many
donors and keeps the load even without any central state.

These objects do not ask donors themselves. `Placement.next()` says what the caller has to do, the
caller reports the result, and so on until a donor is chosen or none is left:

    placement = Placement(donors, holding, rng, policy)
    while isinstance(step := placement.next(), Ask):
        for donor in step.donors:
            placement.answered(donor, await ask(donor))     # None: unreachable
    if isinstance(step, Choose): try to map; when refused: placement.refused(step.donor), go on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from infiniswap.config import PolicyConfig

Donor = TypeVar("Donor", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A donor's answer about its memory, as of now.

    Attributes:
        used_share: memory in use on that host, slabs it lends included, 0..1.
        slabs_mappable: slabs it could lend at once.
        no_room: why it could lend none, in the donor's words; empty if it does not say.
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
    """No donor has room; `DonorBackoff` says when to try again."""


class _Draw(Generic[Donor]):
    """Members of a sequence in random order, each drawn when it is needed (Fisher and Yates): two
    of ten thousand cost two steps, not ten thousand. `drawn`: those of them that come first, which
    are looked for among all members."""

    def __init__(self, members: Sequence[Donor], rng: Random, drawn: Sequence[Donor] = ()) -> None:
        self._members = members
        self._rng = rng
        self._drawn = [donor for donor in drawn if donor in members]
        self._is_drawn = frozenset(self._drawn)
        self._left = len(members)
        self._moved: dict[int, int] = {}  # by place, whose turn it would be there

    def next(self) -> Donor | None:
        """One more; None: all have been drawn."""
        if self._drawn:
            return self._drawn.pop(0)
        while self._left:
            place = self._rng.randrange(self._left)
            self._left -= 1
            drawn = self._moved.get(place, place)
            last = self._moved.pop(self._left, self._left)
            if place != self._left:
                self._moved[place] = last
            if self._members[drawn] not in self._is_drawn:
                return self._members[drawn]
        return None


class Placement(Generic[Donor]):
    """The search for a donor for one slab.

    Args:
        donors: all that there are, distinct.
        holding: those that already hold a slab of this device (M_old); others are ignored.
        rng: source of randomness.
        policy: [policy] of the configuration; `choices` donors are asked at once.
        may_ask: whether a donor may be asked now (see DonorBackoff.is_eligible); None: each may.
        drawn: donors that were drawn for this search before it began, in their order.
    """

    def __init__(
        self,
        donors: Sequence[Donor],
        holding: Collection[Donor],
        rng: Random,
        policy: PolicyConfig,
        may_ask: Callable[[Donor], bool] | None = None,
        drawn: Sequence[Donor] = (),
    ) -> None:
        self._policy = policy
        self._may_ask = may_ask
        self._held = frozenset(holding)
        self._draw = _Draw(donors, rng, drawn)
        self._old: list[Donor] = []  # drawn while M_new was looked for, so in random order
        self._asked: list[Donor] = []
        self._answers: dict[Donor, MemoryUse] = {}

    def next(self) -> Ask[Donor] | Choose[Donor] | Exhausted:
        """The next step. Returns the same step until the caller has reported on it."""
        if self._asked:
            return Ask(tuple(self._asked))
        if self._answers:
            order = {donor: place for place, donor in enumerate(self._answers)}
            best = min(self._answers, key=lambda d: (self._answers[d].used_share, order[d]))
            return Choose(best)
        self._asked = self._next_new()
        if not self._asked:
            # One group at a time: a lone member of M_new is not paired with one of M_old,
            # which could then win although M_new had room.
            self._asked = self._old[: self._policy.choices]
            del self._old[: self._policy.choices]
        return Ask(tuple(self._asked)) if self._asked else Exhausted()

    def _next_new(self) -> list[Donor]:
        found: list[Donor] = []
        while len(found) < self._policy.choices:
            donor = self._draw.next()
            if donor is None:
                break
            if self._may_ask is None or self._may_ask(donor):
                (self._old if donor in self._held else found).append(donor)
        return found

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
