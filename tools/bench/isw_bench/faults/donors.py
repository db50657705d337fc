# SPDX-License-Identifier: Apache-2.0
"""Six donors on loopback that can be killed, started again, and asked for a slab."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from infiniswap.units import format_size
from isw_bench import cluster
from isw_bench.bench import START_S, Bench
from isw_bench.children import Child

COUNT = 6
EVICTING = "isw_bench.faults.evicting_donor"
_EVICT_S_MAX = 10.0


class Donors:
    """The donors of one comparison, by control address.

    Args:
        bench: programs.
        stack: ends them.
        module: what runs as `daemon`.
    """

    def __init__(
        self, bench: Bench, stack: contextlib.ExitStack, module: str = "infiniswap"
    ) -> None:
        self._bench = bench
        self._stack = stack
        self._module = module
        self._next = 0
        self._started = 0
        started = [self._start("127.0.0.1:0") for _ in range(COUNT)]
        self.children = dict(map(self._serving, started))

    @property
    def addresses(self) -> list[str]:
        """Control addresses; the same for good."""
        return list(self.children)

    def _start(self, listen: str) -> tuple[Child, Any]:
        self._started += 1
        settings = self._bench.settings
        ready = self._bench.work / f"daemon{self._started}.ready"
        ready.unlink(missing_ok=True)  # of donors before these
        # Any half of them could hold all of the device.
        pool = format_size(settings.swap_device_bytes // 2)
        argv = cluster.daemon_argv(
            ready, settings.slab_bytes, "--pool", pool, "--headroom", "64M",
            listen=listen, module=self._module,
        )  # fmt: skip
        environment = {
            **cluster.environment(self._bench),
            "INFINISWAP_DAEMON_STATE_DIR": str(self._bench.work / f"daemon{self._started}"),
        }
        child = self._stack.enter_context(
            self._bench.running(f"daemon {self._started}", argv, changes=environment)
        )
        return child, ready

    def _serving(self, started: tuple[Child, Any]) -> tuple[str, Child]:
        child, ready = started
        port = self._bench.until(
            lambda: cluster.control_port(child, ready), "a daemon to serve", START_S
        )
        return f"127.0.0.1:{port}", child

    def kill(self, address: str) -> None:
        """As if its host lost its power, but that its kernel still says so to the others."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.children[address].pid, signal.SIGKILL)

    def revive(self, address: str) -> None:
        """Starts one again that was killed."""
        self.children[address].end()
        self.children |= [self._serving(self._start(address))]

    def evict(self, *, urgent: bool = False) -> dict[str, float]:
        """One slab is taken back, by each donor in its turn (EVICTING ones only); what it says,
        see evicting_donor; empty when nobody holds a slab."""
        for _ in range(COUNT):
            child = list(self.children.values())[self._next]
            self._next = (self._next + 1) % COUNT
            child.tell("hurry" if urgent else "evict")
            told: dict[str, float] = child.answer(_EVICT_S_MAX)
            if told["slabs"]:
                return told
        return {}


@contextlib.contextmanager
def donors(bench: Bench, module: str = "infiniswap") -> Iterator[Donors]:
    """Donors for the length of the block."""
    with contextlib.ExitStack() as stack:
        yield Donors(bench, stack, module)
