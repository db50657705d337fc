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

from collections.abc import Collection, Hashable, Iterable
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


class Placement(Generic[Donor]):
    """The search for a donor for one slab.

    Args:
        donors: those that may be asked (see DonorBackoff.eligible).
        holding: those that already hold a slab of this device (M_old); others are ignored.
        rng: source of randomness.
        policy: [policy] of the configuration; `choices` donors are asked at once.
    """

    def __init__(
        self,
        donors: Iterable[Donor],
        holding: Collection[Donor],
        rng: Random,
        policy: PolicyConfig,
    ) -> None:
        known = list(dict.fromkeys(donors))
        held = set(holding)
        new = [donor for donor in known if donor not in held]
        old = [donor for donor in known if donor in held]
        rng.shuffle(new)
        rng.shuffle(old)
        self._policy = policy
        self._groups = [group for group in (new, old) if group]
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
        while self._groups:
            group = self._groups[0]
            # One group at a time: a lone member of M_new is not paired with one of M_old,
            # which could then win although M_new had room.
            self._asked = group[: self._policy.choices]
            del group[: self._policy.choices]
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
