# SPDX-License-Identifier: Apache-2.0
"""One run: hosts, jobs and failures on virtual time.

In each period the events that are due happen first, then each host looks at its memory, then each
busy device looks at its slabs. Between two looks nothing changes, as in the product, except that
the product's devices look ten times a second while they are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from infiniswap.donor.memory import MemoryFigures
from infiniswap.donor.pool_limits import pool_limits
from infiniswap.policy.eviction import eviction_config
from infiniswap.simulation.device import Device
from infiniswap.simulation.donor import DonorHost
from infiniswap.simulation.exchange import Exchange
from infiniswap.simulation.load import HostLoad, host_load
from infiniswap.simulation.measures import KINDS, Result, Row, spread
from infiniswap.simulation.scenario import Failure, Jobs, Scenario
from infiniswap.simulation.timeline import Timeline

_DRAWS_MAX = 64
"""Hosts that are drawn at random for a job before the others are looked at in turn."""


class World:
    """A scenario and a seed.

    Args:
        scenario: what is simulated.
        seed: of all that is random.
        rule: how slabs get donors; None: as the scenario says.
        load: of the hosts; None: the scenario's.
        donor: what hosts are as donors.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        rule: str | None = None,
        load: HostLoad | None = None,
        donor: type[DonorHost] = DonorHost,
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._rule = rule or scenario.run.rule
        self._load = load or host_load(scenario, seed)
        self._rng = Random(f"{seed}/jobs and failures")
        cluster, config = scenario.cluster, scenario.config
        limits = pool_limits(config, MemoryFigures(cluster.memory_bytes, cluster.memory_bytes))
        draw = Random(f"{seed}/evictions")
        lending = cluster.donors or cluster.hosts
        none = replace(limits, pool_bytes_max=0)
        self.donors = [
            donor(
                *(number, cluster.memory_bytes, limits if number < lending else none),
                *(eviction_config(config), config.daemon.consumer_share_max, draw),
                scenario.run.period_s,
            )
            for number in range(cluster.hosts)
        ]
        self._for_jobs = range(cluster.donors, cluster.hosts)
        self._slab_bytes = limits.slab_bytes
        self._timeline = Timeline()
        self._exchange = Exchange(
            *(scenario, self.donors[:lending], self._rule, Random(f"{seed}/placement")),
            self._timeline,
        )
        self.counts = self._exchange.counts
        self._jobs: dict[int, list[Device]] = {}  # by host
        self._busy = self._exchange.busy
        self._devices: dict[Device, None] = {}
        self._local_bytes = [0] * cluster.hosts
        self._numbers = 0
        self._slowdowns: list[tuple[str, float]] = []
        self.rows: list[Row] = []
        self._plan()

    # --------------------------------------------------------------- what is to happen

    def _plan(self) -> None:
        for jobs in self._scenario.jobs:
            for _ in range(jobs.count):
                start_s = jobs.start_s + self._rng.random() * jobs.start_spread_s
                self._timeline.at(start_s, partial(self._start, jobs))
        for failure in self._scenario.failures:
            self._timeline.at(failure.at_s, partial(self._fail, failure))

    def _start(self, jobs: Jobs, now_s: float) -> None:
        local_bytes = int(jobs.working_set_bytes * jobs.local)
        host = self._host_for(local_bytes, now_s)
        if host is None:
            self.counts["jobs_without_host"] += 1
            return
        self._numbers += 1
        device = Device(
            *(self._numbers, host, jobs, self._slab_bytes, self._scenario.config.policy, now_s),
            *(self._scenario.run.disk_pages_per_s, self._scenario.run.period_s),
        )
        device.grow(now_s)
        self.counts["jobs"] += 1
        self._local_bytes[host] += device.local_bytes
        self._jobs.setdefault(host, []).append(device)
        self._devices[device] = None
        self._busy[device] = None
        if jobs.work_s:
            device.work_s = device.left_s = self._rng.expovariate(1.0 / jobs.work_s)
        if jobs.duration_s:
            end_s = now_s + self._rng.expovariate(1.0 / jobs.duration_s)
            self._timeline.at(end_s, partial(self._end, device))

    def _host_for(self, local_bytes: int, now_s: float) -> int | None:
        """A random host with room."""
        used = self._load.at(now_s)
        room_bytes = self._scenario.cluster.memory_bytes - self._scenario.cluster.system_bytes

        def fits(host: int) -> bool:
            taken_bytes = used[host] + self._local_bytes[host] + local_bytes
            return self.donors[host].is_alive and taken_bytes <= room_bytes

        for _ in range(_DRAWS_MAX):
            host = self._rng.choice(self._for_jobs)
            if fits(host):
                return host
        fitting = [host for host in self._for_jobs if fits(host)]
        return self._rng.choice(fitting) if fitting else None

    def _end(self, device: Device, now_s: float) -> None:
        if device.is_closed:
            return
        self._local_bytes[device.host] -= device.local_bytes
        self._jobs[device.host].remove(device)
        self._devices.pop(device)
        self._exchange.close(device)

    def _fail(self, failure: Failure, now_s: float) -> None:
        alive = [donor for donor in self.donors if donor.is_alive]
        for donor in self._rng.sample(alive, min(failure.hosts, len(alive))):
            self.counts["failures"] += 1
            is_short = 0.0 < failure.for_s <= self._scenario.config.policy.suspend_s
            donor.is_alive = False
            self._exchange.lost(donor, now_s)
            if not is_short:
                for device in list(self._jobs.get(donor.number, ())):
                    self._end(device, now_s)
            if failure.for_s:
                back = partial(self._back, donor, is_short)
                self._timeline.at(now_s + failure.for_s, back)
        if failure.every_s:
            next_s = now_s + self._rng.expovariate(1.0 / failure.every_s)
            self._timeline.at(next_s, partial(self._fail, failure))

    def _back(self, donor: DonorHost, is_short: bool, now_s: float) -> None:
        donor.is_alive = True
        if not is_short:
            donor.lose_everything()
        self._exchange.recovered(donor, now_s)

    # ------------------------------------------------------------------------ periods

    def run(self, progress: Callable[[float], None] | None = None) -> Result:
        """Runs to the end.

        Args:
            progress: called once in a while with the part that is done.
        """
        run = self._scenario.run
        periods = round(run.duration_s / run.period_s)
        sample_s = 0.0
        for period in range(periods + 1):
            now_s = period * run.period_s
            self.step(now_s)
            if now_s >= sample_s or period == periods:
                self.rows.append(self._row(now_s))
                sample_s += run.sample_s
                if progress is not None:
                    progress(period / max(1, periods))
        return self._result()

    def step(self, now_s: float) -> None:
        """One period."""
        self._timeline.run(now_s)
        self._look_at_hosts(now_s)
        for device in list(self._busy):
            self._look_at(device, now_s)
        for device in [device for device in self._devices if device.work_s]:
            device.go_on(self._scenario.run.period_s, self._scenario.run)
            if device.left_s <= 0.0:
                self._slowdowns.append(self._slowdown(device, now_s))
                self._end(device, now_s)

    def _slowdown(self, device: Device, now_s: float) -> tuple[str, float]:
        run = self._scenario.run
        best_s = max((device.work_s - device.left_s) * run.slowdown_donors, run.period_s)
        return device.job.name, max(1.0, (now_s + run.period_s - device.start_s) / best_s)

    def slowdowns(self) -> list[tuple[str, float]]:
        """Of each job with work: its name, and its time against that with all pages on donors."""
        now_s = self._scenario.run.duration_s
        running = [device for device in self._devices if device.work_s]
        return self._slowdowns + [self._slowdown(device, now_s) for device in running]

    def _look_at_hosts(self, now_s: float) -> None:
        used, local = self._load.at(now_s), self._local_bytes
        system = self._scenario.cluster.system_bytes
        for donor in self.donors:
            if not donor.is_alive:
                continue
            number = donor.number
            # A host that wants more than it has pages on its own.
            own_bytes = min(donor.total_bytes, system + used[number] + local[number])
            plan = donor.observe(now_s, own_bytes)
            if plan.evict:
                self._exchange.evict(donor, plan.evict, plan.urgent, now_s)

    def _look_at(self, device: Device, now_s: float) -> None:
        if device.is_closed:
            return
        if device.changes:
            self._local_bytes[device.host] -= device.local_bytes
            device.grow(now_s)
            self._local_bytes[device.host] += device.local_bytes
        device.look(now_s)
        device.fill(now_s)
        self._exchange.map_wanted(device, now_s)
        if device.changes:
            for slab in device.empty(now_s):
                self._exchange.give_back(device, slab)
        if not device.is_busy:
            del self._busy[device]

    # ------------------------------------------------------------------------ results

    def shares(self) -> dict[str, list[float]]:
        """By KINDS, then by host; hosts that have failed are left out."""
        remote: Counter[int] = Counter()
        for device in self._devices:
            for donor, part_bytes in device.remote_by_donor():
                remote[donor.number] += part_bytes
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for donor in self.donors:
            if not donor.is_alive:
                continue
            total = donor.total_bytes
            found["own"].append(donor.own_bytes / total)
            found["pages"].append((donor.own_bytes + remote[donor.number]) / total)
            mapped_bytes = donor.pool.mapped * self._slab_bytes
            found["slabs"].append((donor.own_bytes + mapped_bytes) / total)
            held_bytes = donor.pool.total * self._slab_bytes
            found["held"].append((donor.own_bytes + held_bytes) / total)
        return found

    def _row(self, now_s: float) -> Row:
        shares = self.shares()
        wanted = served = 0.0
        unmapped = 0
        for device in self._devices:
            rate, by_donors = device.rates()
            wanted, served = wanted + rate, served + by_donors
            unmapped += device.unmapped_count()
        return Row(
            time_s=now_s,
            own=spread(shares["own"]),
            slabs=spread(shares["slabs"]),
            held=spread(shares["held"]),
            pages_mean=sum(shares["pages"]) / len(shares["pages"]),
            mapped=sum(donor.pool.mapped for donor in self.donors if donor.is_alive),
            unmapped=unmapped,
            evictions=self.counts["evictions"],
            messages=self._exchange.messages.total(),
            served=served / wanted if wanted else 1.0,
        )

    def _result(self) -> Result:
        shares = self.shares()
        messages = self._exchange.messages
        mapped = self.counts["mapped"]
        return Result(
            scenario=self._scenario.title,
            rule=self._rule,
            seed=self._seed,
            hosts=shares,
            use={kind: spread(values) for kind, values in shares.items()},
            counts=dict(sorted(self.counts.items())),
            messages=dict(sorted(messages.items())),
            messages_per_slab=messages.total() / mapped if mapped else None,
            served_mean=sum(row.served for row in self.rows) / len(self.rows),
            rows=self.rows,
        )

    def devices(self) -> list[Device]:
        """Those of jobs that run."""
        return list(self._devices)
