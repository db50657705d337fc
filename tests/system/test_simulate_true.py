# SPDX-License-Identifier: Apache-2.0
"""The simulator beside real daemons: six donors and three consumers do the same in both.

Each run starts three devices, fills all of their slabs, and then takes memory from one donor, which
has to evict. The simulator gets what was measured of each run: what donors use for themselves, when
each device began to map, and how long it took for a slab. The test prints a table with the mean of
both for each figure, and their standard errors.

Thirty runs take half an hour. With INFINISWAP_TEST_RESULTS=DIRECTORY each run is kept in a file
there, and a test that was interrupted goes on where it was.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest
from netns_cluster.cluster import Cluster
from numpy.typing import NDArray
from support.devices.cluster import SLAB, until
from support.machine.netns_hosts import HostedDevice, cluster_of
from support.machine.ran import ran

from infiniswap.config import Config
from infiniswap.control.messages import Status
from infiniswap.simulation.load import Traced
from infiniswap.simulation.scenario import Cluster as SimulatedCluster
from infiniswap.simulation.scenario import Jobs, Run, Scenario
from infiniswap.simulation.trace import Trace
from infiniswap.simulation.world import World
from infiniswap.units import CONTROL_PORT, MIB

RUNS = int(os.environ.get("INFINISWAP_TEST_RUNS", "30"))
RESULTS = os.environ.get("INFINISWAP_TEST_RESULTS", "")
SIMULATED = 20
"""Simulated runs for each real one: almost only the real ones' errors count."""
DONORS = [f"h{number}" for number in range(1, 7)]
CONSUMERS = ["h7", "h8", "h9"]
SLABS = 8
"""Of a device."""
KEPT = 2
"""Slabs that the squeezed donor has memory for, give or take one: its own memory moves a little."""
TOTAL, HEADROOM = 192 * MIB, 80 * MIB
"""So much headroom that the eviction is not in a hurry: the slabs move."""
SETTLED_S = 40.0
"""So long after a donor was squeezed all is over, in the simulator."""
TWO_SE = 0.0455
"""Chance that a normal deviate is more than two standard errors from its mean, on either side."""
BATCHES = 4000
"""Of simulated runs, to find how far figures lie apart by chance."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run.

    Attributes:
        slabs: by donor, sorted, before one is squeezed.
        evictions, remaps, refusals: after that.
    """

    slabs: tuple[int, ...]
    evictions: int
    remaps: int
    refusals: int

    def values(self) -> dict[str, float]:
        """By name."""
        found: dict[str, float] = {
            f"slabs of donor {place}": count for place, count in enumerate(self.slabs, 1)
        }
        return found | {
            "evictions": self.evictions,
            "remaps": self.remaps,
            "refusals": self.refusals,
        }


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the simulator is given of a run.

    Attributes:
        used: share of its memory that each donor uses for itself at the start.
        squeezed: the same of the first donor, after it was squeezed.
        began_s: when each device had its first slab mapped, counted from the first device.
        map_s: how long a device took for a slab, on average.
    """

    used: tuple[float, ...]
    squeezed: float
    began_s: tuple[float, ...]
    map_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a real run."""

    figures: Figures
    beginning: Beginning


_MAPPED = re.compile(r"^(\S+ \S+) INFO slab \d+: mapped to donor", re.MULTILINE)


def mapping_times(logs: Sequence[str]) -> tuple[tuple[float, ...], float]:
    """`began_s` and `map_s` of Beginning, from the logs of the devices."""
    times = []
    for text in logs:
        moments = [datetime.strptime(one, "%Y-%m-%d %H:%M:%S,%f") for one in _MAPPED.findall(text)]
        assert len(moments) == SLABS, text
        times.append([moment.timestamp() for moment in moments])
    first_s = min(of_device[0] for of_device in times)
    took_s = fmean(of_device[-1] - of_device[0] for of_device in times)
    return tuple(of_device[0] - first_s for of_device in times), took_s / (SLABS - 1)


def statuses(cluster: Cluster) -> list[Status]:
    """Of all donors; on a busy machine one may have to be asked twice."""
    return [
        until(lambda host=host: cluster.state(host).status, f"{host} answers")  # type: ignore[misc]
        for host in DONORS
    ]


def real_run(cluster: Cluster, number: int, content: Path) -> Outcome:
    """One run on the real cluster, which is left as it was."""

    def rests() -> bool:
        pools = [status.pool for status in statuses(cluster)]
        return is_steady() and all(p.slabs_mapped == 0 and p.slabs_free > 0 for p in pools)

    def is_steady() -> bool:
        """Whether each donor's average use has reached what it uses now, so that it neither gives
        slabs back nor makes some."""
        for status in statuses(cluster):
            pool, memory = status.pool, status.memory
            slabs = pool.slabs_mapped + pool.slabs_free + pool.slabs_dirty
            now_bytes = memory.total_bytes - memory.available_bytes - slabs * SLAB
            if pool.slabs_dirty or abs(now_bytes - memory.others_bytes) > MIB:
                return False
        return True

    def is_whole() -> bool:
        return all(device.status["slabs"]["mapped"] == SLABS for device in devices)

    devices: list[HostedDevice] = []
    until(rests, "donors at rest")
    at_start = statuses(cluster)
    refused = sum(status.counters.get("maps_refused", 0) for status in at_start)
    used = tuple(status.memory.others_bytes / TOTAL for status in at_start)
    donors = ",".join(f"{cluster.record.host(one).address}:{CONTROL_PORT}" for one in DONORS)
    options = ("--size", f"{SLABS * SLAB >> 20}M", "--donors", donors, "--frontend", "nbd-socket")
    try:
        for host in CONSUMERS:
            devices.append(HostedDevice(cluster, host, f"{cluster.name}{host}r{number}", *options))
        for device in devices:
            copied = ran("nbdcopy", str(content), f"nbd+unix:///?socket={device.run / 'nbd.sock'}")
            assert copied.returncode == 0, copied.stderr
        until(is_whole, "every slab on a donor")
        mapped = [status.pool.slabs_mapped for status in statuses(cluster)]
        assert sum(mapped) == SLABS * len(devices)
        times = mapping_times([(device.run / "log").read_text() for device in devices])
        room = TOTAL - HEADROOM - int(used[0] * TOTAL) - KEPT * SLAB - SLAB // 2
        squeeze_bytes = room // MIB * MIB
        cluster.squeeze(DONORS[0], squeeze_bytes)

        until(is_steady, "the end of what the squeezed donor takes back")
        until(is_whole, "the slabs that it took back on other donors")
        after = statuses(cluster)[0].memory.others_bytes / TOTAL
        counts = [device.status["slab_counts"] for device in devices]
        now_refused = sum(s.counters.get("maps_refused", 0) for s in statuses(cluster))
        figures = Figures(
            tuple(sorted(mapped)),
            sum(count["evicted"] for count in counts),
            sum(count["remapped"] for count in counts),
            now_refused - refused,
        )
        return Outcome(figures, Beginning(used, after, *times))
    finally:
        cluster.release(DONORS[0])
        for device in devices:
            device.command("remove")


def simulated_run(beginning: Beginning, seed: int, rule: str = "product") -> Figures:
    """The same in the simulator."""
    hosts = tuple(f"h{number}" for number in range(1, 10))
    quiet = (0.2,) * len(CONSUMERS)
    before = beginning.used + quiet
    after = (beginning.squeezed, *beginning.used[1:], *quiet)
    config = Config()
    daemon = replace(config.daemon, slab_bytes=SLAB, headroom_bytes=HEADROOM)
    job = Jobs(working_set_bytes=SLABS * SLAB, local=0.0, pages_per_s=20_000.0)
    period_s = beginning.map_s
    squeezed_s = max(beginning.began_s) + 2 * SLABS * period_s
    end_s = squeezed_s + SETTLED_S
    scenario = Scenario(
        "test",
        cluster=SimulatedCluster(
            hosts=len(hosts), donors=len(DONORS), memory_bytes=TOTAL, system_bytes=0
        ),
        run=Run(duration_s=end_s, period_s=period_s, map_s=period_s, rule=rule),
        jobs=tuple(replace(job, start_s=began_s) for began_s in beginning.began_s),
        config=replace(config, daemon=daemon),
    )
    trace = Trace((0.0, squeezed_s), hosts, (before, after))
    world = World(scenario, seed, load=Traced(trace, scenario))
    slabs: tuple[int, ...] = ()
    for period in range(math.ceil(end_s / period_s)):
        if period * period_s >= squeezed_s and not slabs:
            slabs = tuple(sorted(donor.pool.mapped for donor in world.donors[: len(DONORS)]))
        world.step(period * period_s)
    assert sum(slabs) == SLABS * len(CONSUMERS)
    counts = world.counts
    return Figures(slabs, counts["evictions"], counts["remapped"], counts["refused"])


def simulated(outcomes: Sequence[Outcome], each: int = SIMULATED) -> list[Figures]:
    """So many for each real run."""
    return [
        simulated_run(outcome.beginning, number * each + seed)
        for number, outcome in enumerate(outcomes)
        for seed in range(each)
    ]


# ------------------------------------------------------------------------------ agreement


def values_of(runs: Sequence[Figures]) -> NDArray[np.float64]:
    """By run, then by figure."""
    return np.array([list(run.values().values()) for run in runs])


def distances(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how many standard errors the mean of each figure differs from the simulator's.

    The error is that of `ours`, runs are the second dimension from the end. A few runs may all have
    the same value by chance, of a figure that does vary: so a run's variance is the larger one of
    both samples.
    """
    variance = np.maximum(ours.var(axis=-2), theirs.var(axis=0))
    error = np.sqrt(variance / ours.shape[-2])
    difference = np.abs(ours.mean(axis=-2) - theirs.mean(axis=0))
    return np.divide(difference, error, out=np.zeros_like(difference), where=error > 0.0)


def distance_max(runs: int, theirs: NDArray[np.float64]) -> float:
    """How many standard errors any of the figures may differ.

    One figure is more than two standard errors from its mean with a chance of TWO_SE. With nine
    figures, one of them is so far away in every third test. Therefore all of them together get that
    chance: in so many of the batches of simulated runs some figure is farther away than this. (The
    maximum over figures, of samples drawn again: Westfall and Young 1993. It needs no normal
    distribution, and knows that what one donor has more another one has less.)
    """
    drawn = np.random.default_rng(1).integers(len(theirs), size=(BATCHES, runs))
    farthest = distances(theirs[drawn], theirs).max(axis=1)
    return float(np.quantile(farthest, 1.0 - TWO_SE))


def table(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[str]:
    """Lines to print."""
    lines = [f"{'figure':18} {'daemons':>15} {'simulator':>15} {'difference':>12}"]
    sides = values_of(ours), values_of(theirs)
    for place, (name, distance) in enumerate(zip(ours[0].values(), distances(*sides), strict=True)):
        cells = [
            f"{side[:, place].mean():.2f} ± {side[:, place].std(ddof=1) / len(side) ** 0.5:.2f}"
            for side in sides
        ]
        lines.append(f"{name:18} {cells[0]:>15} {cells[1]:>15} {distance:>9.1f} SE")
    return lines


EVEN = Beginning((0.18,) * len(DONORS), 0.5, (0.0, 2.0, 4.0), 1.0)


def test_the_criterion_tells_a_wrong_rule_from_the_right_one() -> None:
    theirs = values_of([simulated_run(EVEN, seed) for seed in range(150)])
    allowed = distance_max(30, theirs)
    assert 2.0 < allowed < 4.0
    again = values_of([simulated_run(EVEN, 1000 + seed) for seed in range(30)])
    assert distances(again, theirs).max() <= allowed
    wrong = values_of([simulated_run(EVEN, 1000 + seed, "random") for seed in range(30)])
    assert distances(wrong, theirs).max() > allowed


# ------------------------------------------------------------------------------ real runs


def outcomes(directory: Path, show: Callable[[str], None]) -> list[Outcome]:
    """Those that are kept there, and the rest of RUNS."""
    content = directory / "content"
    content.write_bytes(os.urandom(SLABS * SLAB))
    memory_bytes = [TOTAL] * len(DONORS) + [128 * MIB] * len(CONSUMERS)
    found = []
    with ExitStack() as stack:
        cluster: Cluster | None = None
        for number in range(RUNS):
            kept = directory / f"run{number}.json"
            if not kept.exists():
                # A busy machine's donors answer late and would be passed over; the simulator's are
                # never late.
                cluster = cluster or stack.enter_context(
                    cluster_of(memory_bytes, HEADROOM, {"cluster.ask_s": "30.0"})
                )
                outcome = real_run(cluster, number, content)
                part = kept.with_suffix(".part")
                part.write_bytes(msgspec.json.encode(outcome))
                part.rename(kept)
            found.append(msgspec.json.decode(kept.read_bytes(), type=Outcome))
            show(f"run {number + 1} of {RUNS}: {found[-1].figures}")
    return found


@pytest.mark.full
@pytest.mark.requires_netns
@pytest.mark.requires_tool("ip", "tc", "nsenter", "setsid", "nbdcopy")
@pytest.mark.timeout(7200)
def test_daemons_do_what_the_simulator_says(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def show(*lines: str) -> None:
        with capture.global_and_fixture_disabled():
            print("", *lines, sep="\n", flush=True)

    real = outcomes(Path(RESULTS) if RESULTS else tmp_path, show)
    ours, theirs = [outcome.figures for outcome in real], simulated(real)
    sides = values_of(ours), values_of(theirs)
    allowed = distance_max(RUNS, sides[1])
    show(f"{RUNS} runs; mean ± standard error", *table(ours, theirs), f"allowed: {allowed:.1f} SE")
    assert distances(*sides).max() <= allowed
