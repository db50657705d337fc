# SPDX-License-Identifier: Apache-2.0
"""What hosts use of their memory for themselves, over time: constant, from a distribution with
daily cycles and changes by the minute, or from a trace.

Only a distribution needs numpy, which makes the values of all hosts at once. The policies then
observe host by host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infiniswap.errors import ConfigError, UnavailableError
from infiniswap.extras import SIMULATE, how_to_install
from infiniswap.simulation.scenario import Scenario
from infiniswap.simulation.trace import Trace, read_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MINUTE_S = 60.0
_DAY_S = 86_400.0
_KEPT = 0.95
"""Of a host's distance from its mean, after a minute."""
_NORMAL_P99 = 2.5758
"""99 of 100 normal deviates are smaller than so many standard deviations, on either side."""


class HostLoad(Protocol):
    """Bytes in use by host."""

    def at(self, time_s: float) -> Sequence[int]:
        """At this time; times rise from call to call."""


class Constant:
    """Every host uses the same, all the time."""

    def __init__(self, hosts: int, used_bytes: int) -> None:
        self._used = [used_bytes] * hosts

    def at(self, time_s: float) -> Sequence[int]:
        """Always the same list."""
        return self._used


class Traced:
    """As in a trace, whose hosts stand for those of the scenario in turn."""

    def __init__(self, trace: Trace, scenario: Scenario) -> None:
        self._trace = trace
        self._hosts = scenario.cluster.hosts
        self._memory_bytes = scenario.cluster.memory_bytes
        self._row: tuple[float, ...] = ()
        self._used: list[int] = []

    def at(self, time_s: float) -> Sequence[int]:
        """Those of the last row that is not later."""
        row = self._trace.at(time_s)
        if row is not self._row:
            self._row = row
            used = [int(share * self._memory_bytes) for share in row]
            self._used = [used[host % len(used)] for host in range(self._hosts)]
        return self._used


class Distributed:
    """Each host, or each of its containers, has a mean from the distribution, a daily cycle, and a
    random walk by the minute that always returns to the mean.

    Args:
        scenario: the distribution.
        seed: of all that is drawn at random.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        np = _numpy()
        load = scenario.load
        self._shape = (scenario.cluster.hosts, load.containers)
        count = scenario.cluster.hosts * load.containers
        self._np = np
        self._rng = np.random.default_rng([seed, 1])
        self._memory_bytes = scenario.cluster.memory_bytes
        self._daily = load.daily_share
        shares, values = zip(*load.quantiles, strict=True)
        # One from each equal part of the distribution: its quantiles are then exact.
        places = (np.arange(count) + self._rng.random(count)) / count
        self._mean: NDArray[Any] = np.interp(self._rng.permutation(places), shares, values)
        spread_s = load.daily_spread_h * 3600.0
        self._peak_s = self._rng.random(count) * spread_s
        # The way back to the mean is a part of each change, too.
        self._step = load.change_p99 / _NORMAL_P99 / math.sqrt(2.0 / (1.0 + _KEPT))
        # The walk begins in its long-run distribution, so that the first hour is like every other.
        still = self._step / math.sqrt(1.0 - _KEPT * _KEPT)
        self._before = self._rng.standard_normal(count) * still
        self._after = self._walk()
        self._minute = 0

    def _walk(self) -> NDArray[Any]:
        return self._before * _KEPT + self._rng.standard_normal(len(self._mean)) * self._step

    def at(self, time_s: float) -> Sequence[int]:
        """Straight lines between minutes."""
        minute = int(time_s // _MINUTE_S)
        while self._minute < minute:
            self._minute += 1
            self._before = self._after
            self._after = self._walk()
        part = time_s / _MINUTE_S - minute
        share = self._mean + self._before * (1.0 - part) + self._after * part
        if self._daily:
            angle = 2.0 * math.pi * (time_s - self._peak_s) / _DAY_S
            share = share + self._daily * self._mean * self._np.cos(angle)
        share = self._np.clip(share, 0.0, 1.0).reshape(self._shape).mean(axis=1)
        used = (share * self._memory_bytes).astype(self._np.int64)
        return used.tolist()  # type: ignore[no-any-return]


def host_load(scenario: Scenario, seed: int) -> HostLoad:
    """The load of a scenario.

    Raises:
        ConfigError: the trace has a mistake.
        UnavailableError: numpy is needed and not installed.
    """
    if scenario.trace_path:
        hold = scenario.load.trace_gaps == "hold"
        trace = read_trace(Path(scenario.trace_path), hold_gaps=hold)
        if scenario.cluster.hosts < len(trace.hosts):
            raise ConfigError(
                f"the trace has {len(trace.hosts)} hosts and the scenario {scenario.cluster.hosts}",
                where=scenario.origin,
                mend="Raise cluster.hosts: no host of the trace may be left out.",
            )
        return Traced(trace, scenario)
    if scenario.load.quantiles:
        return Distributed(scenario, seed)
    return Constant(scenario.cluster.hosts, 0)


def install() -> str:
    """The remedy where a library of the simulation is missing."""
    return how_to_install(SIMULATE, "infiniswap simulate SCENARIO")


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise UnavailableError(
            f"this scenario needs numpy: {error}", where="load.quantiles", mend=install()
        ) from error
    return numpy
