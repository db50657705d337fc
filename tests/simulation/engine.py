# SPDX-License-Identifier: Apache-2.0
"""The compiled engine, stepped, with connections to the stores of simulated donors."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any

from support.devices.stepped_engine import SimEngine

from infiniswap.engine.protocol import EngineConfig, RemoteConfig
from infiniswap.errors import EngineError
from simulation.store import SLAB_BYTES, SimStore, StoreLease


class Connection:
    """The connections of one remote to one lease. They break and are fenced together.

    Attributes:
        lease: that they are bound to.
        is_current: the engine's remote has not been connected anew since.
        is_broken: the device's end is closed. What was sent may still land ...
        is_closed: ... unless the donor's end is closed.
    """

    def __init__(
        self, engine: CoupledEngine, config: RemoteConfig, remote: int, lease: StoreLease
    ) -> None:
        self.engine = engine
        self.queues = config.queues
        self.donor = config.host
        self.remote = remote
        self.lease = lease
        self.is_current = True
        self.is_broken = False
        self.is_closed = False
        self.stalled_s: float | None = None

    def lay(self, slot: int, memory: Any) -> None:
        """What the donor's slot is from now on."""
        if self.is_current and not self.is_closed:
            self.engine.slot(self.remote, slot, memory)

    def closed_by_donor(self) -> None:
        """Nothing that was sent takes effect any more."""
        self.is_closed = True
        if self.is_current:
            self.engine.fence(self.remote)

    def gone(self) -> None:
        """The donor has noticed that the device's end is closed: all that was sent has landed."""
        if self in self.lease.connections:
            self.lease.connections.remove(self)
        if not self.is_closed:
            self.closed_by_donor()


Dial = Callable[[RemoteConfig], SimStore]
"""The store that answers at an address. Raises EngineError."""


class CoupledEngine(SimEngine):
    """A SimEngine whose remotes are what the device connects.

    Args:
        name: of the device.
        config: shape.
        dial: finds the store.
        broken: told when the device's end of a connection is closed.
    """

    def __init__(
        self, name: str, config: EngineConfig, dial: Dial, broken: Callable[[Connection], None]
    ) -> None:
        super().__init__(config)
        with super()._use() as pointer:
            self._raw = contextlib.nullcontext(pointer)
        self.name = name
        self._dial = dial
        self._broken = broken
        self.connections: dict[int, Connection] = {}

    def _use(self) -> Any:
        # There is one thread: what else counts calls under way costs more than the calls.
        return self._raw if hasattr(self, "_raw") else super()._use()

    def _lease(self, config: RemoteConfig) -> StoreLease:
        store = self._dial(config)
        found = None if store.closed else store.use_tickets(config.tickets)
        if found is None:
            raise EngineError("no such export", code=errno.ENOENT)
        return found

    def remote_connect(self, config: RemoteConfig) -> int:
        lease = self._lease(config)
        remote = self.remote(config.queues, config.export_bytes // SLAB_BYTES)
        self._bind(Connection(self, config, remote, lease))
        return remote

    def remote_reconnect(self, remote: int, config: RemoteConfig) -> None:
        lease = self._lease(config)
        self.send_held_back()
        self.sim_reconnect(remote)
        self._bind(Connection(self, config, remote, lease))

    def _bind(self, connection: Connection) -> None:
        if old := self.connections.get(connection.remote):
            old.is_current = False
        self.connections[connection.remote] = connection
        lease = connection.lease
        lease.connections.append(connection)
        for slot in range(lease.slots_max):
            connection.lay(slot, lease.slots[slot].memory if slot in lease.slots else None)

    def remote_shutdown(self, remote: int) -> None:
        super().remote_shutdown(remote)
        self.remote_broken(remote)

    def remote_destroy(self, remote: int) -> None:
        super().remote_destroy(remote)
        self.remote_broken(remote)
        self.connections.pop(remote).is_current = False

    def remote_broken(self, remote: int) -> None:
        """The device's end is closed."""
        connection = self.connections.get(remote)
        if connection is not None and not connection.is_broken:
            connection.is_broken = True
            self._broken(connection)

    def live(self) -> list[Connection]:
        return list(self.connections.values())
