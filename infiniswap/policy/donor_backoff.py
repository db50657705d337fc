# SPDX-License-Identifier: Apache-2.0
"""Which donors are not worth asking for a while: unreachable, without room, or distrusted."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Donor = TypeVar("Donor", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BackoffConfig:
    """When a donor that failed is asked again, in seconds.

    Attributes:
        unreachable_s: after the first failure; doubles with every further one in a row.
        unreachable_s_max: upper bound of that.
        full_s: after an answer without room.
        distrust_s: after it was given up for its faults; doubles with every further time.
        distrust_s_max: upper bound of that; after so long without a further fault it is forgiven.
    """

    unreachable_s: float = 1.0
    unreachable_s_max: float = 30.0
    full_s: float = 2.0
    distrust_s: float = 10.0
    distrust_s_max: float = 3600.0


class DonorBackoff(Generic[Donor]):
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
        """A donor was given up for its faults; returns for how long, in seconds."""
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
        """A donor answered and has room: it may be asked again at once."""
        self._failures.pop(donor, None)
        self._retry_s.pop(donor, None)

    def forget(self, donor: Donor) -> None:
        """The donor is no longer configured."""
        self.good(donor)
        self._distrusted.pop(donor, None)

    def is_eligible(self, donor: Donor, now_s: float) -> bool:
        """Whether this donor may be asked now."""
        return self._retry_s.get(donor, now_s) <= now_s

    def retry_s(self, donors: Iterable[Donor], now_s: float) -> float | None:
        """Time at which the first of the given donors that must wait may be asked again.

        None when none of them has to wait.
        """
        waiting = [self._retry_s[d] for d in donors if self._retry_s.get(d, now_s) > now_s]
        return min(waiting, default=None)
