# SPDX-License-Identifier: Apache-2.0
"""Two donors: daemons of this host's memory, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from infiniswap.control.client import ClientConfig, fetch_status
from infiniswap.demo.children import Child, mortal
from infiniswap.demo.leftovers import Record
from infiniswap.errors import DeadlineError, InfiniswapError
from infiniswap.secret import read_secret
from infiniswap.system.programs import infiniswap
from infiniswap.units import HostPort, format_size, format_size_short

NAMES = ("donor-1", "donor-2")
_START_S_MAX = 60.0
_STOP_S = 20.0
_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A donor's own counters: bytes of pages that it has sent and taken in since its start."""

    name: str
    read_bytes: int
    write_bytes: int


class DemoDonor:
    """One daemon.

    Args:
        name: of the donor.
        record: says where logs and the secret lie.
        config: configuration file.
        pool_bytes: what it lends at most.

    Raises:
        SystemCallError: it cannot be started.
    """

    def __init__(self, name: str, record: Record, config: Path, pool_bytes: int) -> None:
        self.name = name
        self._ready = record.work / f"{name}.ready"
        self._client = ClientConfig(keys=read_secret(record.secret), connect_s=_ASK_S)
        self.address = HostPort("127.0.0.1", 0)
        argv = infiniswap(
            *("daemon", "--config", str(config), "--listen", str(self.address), "--name", name),
            *("--pool", format_size(pool_bytes), "--headroom", "256M"),
            *("--ready-file", str(self._ready)),
        )
        self._child = Child(name, mortal(argv, signal.SIGTERM), record.work / f"{name}.log")

    def await_ready(self) -> None:
        """Returns when it serves, with its first slabs at hand.

        Raises:
            SystemCallError: it ended; says what it printed.
            DeadlineError: it does not answer, or has no slab.
        """
        end_s = time.monotonic() + _START_S_MAX
        while problem := self._not_ready():
            if time.monotonic() >= end_s:
                raise DeadlineError(
                    f"{self.name} did not serve within {_START_S_MAX:g} s ({problem}); it last "
                    f"said: {self._child.log_tail() or 'nothing'}"
                )
            time.sleep(0.1)

    def _not_ready(self) -> str:
        """Why it cannot lend yet, "" when it can."""
        code = self._child.exit_code
        if code is not None:
            self._child.check(code or 1)
        try:
            port = json.loads(self._ready.read_text(encoding="utf-8"))["control_port"]
            self.address = HostPort(self.address.host, port)
            status = asyncio.run(fetch_status(self.address, self._client))
        except (OSError, ValueError):
            return "it is starting"
        except InfiniswapError as error:
            return str(error)
        available = format_size_short(status.memory.available_bytes)
        free = status.pool.slabs_free
        return "" if free else f"it has no free slab, with {available} of memory available"

    def served(self) -> Served:
        """Its counters now, asked of itself.

        Raises:
            NoDonorError: it does not answer.
        """
        counters = asyncio.run(fetch_status(self.address, self._client)).counters
        return Served(self.name, counters["read_bytes"], counters["write_bytes"])

    def stop(self) -> None:
        """Ends it. Idempotent.

        Raises:
            DeadlineError: it cannot be killed.
        """
        self._child.end(_STOP_S)


def stop_all(donors: list[DemoDonor]) -> None:
    """Ends them; one that cannot be killed is raised when all were tried.

    Raises:
        DeadlineError: one cannot be killed.
    """
    with contextlib.ExitStack() as ends:
        for donor in donors:
            ends.callback(donor.stop)
