# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan of faults (faultplan) on a cluster of tools/netns-cluster."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from random import Random

from netns_cluster import network
from netns_cluster.cluster import Cluster

from infiniswap.control.client import ClientConfig, set_draining
from infiniswap.errors import MemoryLimitError
from infiniswap.secret import read_secret
from infiniswap.units import CONTROL_PORT, MIB, HostPort
from support.jobs.faultplan import Fault, Undo, faults

_SLICE_S = 0.2
_LEFT_BYTES = 8 * MIB
"""Of a squeezed host: less, and the kernel ends what squeezes."""


class Chaos:
    """Does things to hosts, and undoes them. Each is printed, so that a seed that fails can be
    followed.

    Args:
        cluster: up, every daemon serving.
        donors: names of hosts that lend.
        consumers: names of hosts that lose their network now and then.
        seed: decides everything.
        check: called again and again; raises when something is wrong already.
    """

    def __init__(
        self,
        cluster: Cluster,
        donors: list[str],
        consumers: list[str],
        seed: int,
        check: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._hosts = donors + consumers
        self._plan: Iterator[Fault] = faults(Random(seed), donors, consumers)
        self._check = check
        self._undo = Undo()
        self._booting: set[str] = set()
        self._zero_s = 0.0
        self.count = 0

    def run(self, count: int | None, budget_s: float) -> None:
        """That many faults, or as many as begin in that time; all are undone at the end."""
        begun_s = time.monotonic()
        self._zero_s = begun_s
        for fault in self._plan:
            is_over = time.monotonic() - begun_s >= budget_s
            if self.count >= count if count is not None else is_over:
                break
            self._undo_until(fault.start_s)
            self._sleep_until(fault.start_s)
            self._begin(fault)
        self._undo_until(math.inf)
        for host in list(self._booting):
            self._serving(host)

    def _undo_until(self, plan_s: float) -> None:
        while (fault := self._undo.pop(plan_s)) is not None:
            self._sleep_until(fault.end_s)
            for kind in reversed(fault.kinds):
                self._end(kind, fault.host)
            print(f"  end of fault {fault.number}: {fault.host}", flush=True)

    def _sleep_until(self, plan_s: float) -> None:
        """Whoever is late stays late: pauses and lengths of the plan are kept."""
        self._check()
        while (left_s := self._zero_s + plan_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLICE_S))
            self._check()
        self._zero_s -= left_s

    # ----------------------------------------------------------------------- faults

    def _begin(self, fault: Fault) -> None:
        self.count += 1
        print(str(fault), flush=True)
        self._serving(fault.host)
        daemon = self._cluster.record.host(fault.host).daemon
        assert daemon is not None
        assert daemon.state, f"the daemon of {fault.host} has died by itself"
        for kind in fault.kinds:
            self._do(kind, fault)
        self._undo.push(fault)

    def _do(self, kind: str, fault: Fault) -> None:
        host = fault.host
        match kind:
            case "kill":
                self._cluster.kill(host)
            case "restart":
                self._cluster.restart(host, wait=False)
                self._booting.add(host)
            case "freeze":
                self._cluster.freeze(host)
            case "cut":
                self._cluster.cut(host)
            case "delay":
                self._cluster.delay(host, fault.delay_ms)
            case "drain":
                self._drain(host, True)
            case "squeeze":
                self._squeeze(host, fault.amount)

    def _end(self, kind: str, host: str) -> None:
        match kind:
            case "kill":
                self._cluster.restart(host, wait=False)
                self._booting.add(host)
            case "freeze":
                self._cluster.thaw(host)
            case "cut" | "delay":
                self._cluster.heal(host)
            case "drain":
                self._drain(host, False)
            case "squeeze":
                self._cluster.release(host)

    def _serving(self, host: str) -> None:
        if host in self._booting:
            self._cluster.await_serving(host)
            self._booting.discard(host)

    def _drain(self, name: str, draining: bool) -> None:
        """As `infiniswap donor drain` does, from the host itself, whose cable may be cut."""
        self._serving(name)
        client = ClientConfig(read_secret(self._cluster.secret_file), 30.0)
        address = HostPort(self._cluster.record.host(name).address, CONTROL_PORT)
        network.call_inside(
            self._cluster.name,
            name,
            lambda: asyncio.run(set_draining(address, client, draining)),
        )

    def _squeeze(self, name: str, share: float) -> None:
        """Applications take so much that the donor has to evict this share of what it lends."""
        state = self._cluster.state(name)
        assert state.status is not None, f"the daemon of {name} does not answer"
        assert state.memory.available_bytes is not None
        status = state.status
        slabs = status.pool.slabs_free + status.pool.slabs_dirty
        slabs += math.ceil(share * status.pool.slabs_mapped)
        possible = state.memory.available_bytes + slabs * status.slab_bytes
        try:
            self._cluster.squeeze(name, possible - status.memory.headroom_bytes)
        except MemoryLimitError:
            # The host's applications were faster than the daemon: bad for them, not for pages.
            print(f"  {name} had not that much memory soon enough", flush=True)
