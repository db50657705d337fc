# SPDX-License-Identifier: Apache-2.0
"""What the engine's C threads report, and what follows: drains end, donors are lost or distrusted,
alarms come and go."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from infiniswap import events
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.engine.protocol import Engine, EngineEvent, EventKind

log = logging.getLogger(__name__)


class EngineEvents:
    """A part of the mapper. Everything runs on the event loop.

    Args:
        engine: reports.
        known_donors: the donors that events are about.
        alarms: of the device.
        refused: called with a donor and a slab that it had taken on and now refuses.

    Attributes:
        backup: the file or block device that an alarm about the backup names.
        on_connection_lost: called when a connection of the front end, or all of it, may have ended.
        on_use: called when the device is used after a rest (Engine.report_use).
        drains: tasks that wait for a drain, by slab, remote and generation.
    """

    def __init__(
        self,
        engine: Engine,
        known_donors: KnownDonors,
        alarms: Alarms,
        refused: Callable[[DonorLink, int], None],
    ) -> None:
        self.alarms = alarms
        self.backup = ""
        self.on_connection_lost: Callable[[], None] = lambda: None
        self.on_use: list[Callable[[], None]] = []
        self.drains: dict[tuple[int, int, int], asyncio.Future[None]] = {}
        self._engine = engine
        self._known_donors = known_donors
        self._refused = refused

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        """Resolves when the engine reports the slab's drain. Ask before unmapping."""
        future = self.drains.get((slab, remote, generation))
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self.drains[slab, remote, generation] = future
        return future

    def take(self) -> None:
        """Takes all events; called when the engine's eventfd is readable."""
        while found := self._engine.events():
            for event in found:
                self._take(event)

    def _take(self, event: EngineEvent) -> None:
        match event.kind:
            case EventKind.SLAB_DRAINED:
                self._drain_ended(event.slab, event.remote, event.generation)
            case EventKind.REMOTE_DOWN:
                for link in self._known_donors.links:
                    if link.remote == event.remote:
                        link.connections_down(event.code)
                        now_s = asyncio.get_running_loop().time()
                        self._known_donors.backoff.unreachable(link, now_s)
            case EventKind.SLAB_ERROR:
                self._donor_refused(event)
            case EventKind.BAD_PAGE:
                self._bad_page(event)
            case EventKind.BACKUP_FAILING:
                name = f"the backup {self.backup}".rstrip()
                self.alarms["backup"] = f"{name} refuses writes: {os.strerror(-event.code)}"
                log.error(
                    "%s; pages stay in staging, writes are retried",
                    self.alarms["backup"],
                    extra=events.about(events.BACKUP_FAILING),
                )
            case EventKind.BACKUP_RECOVERED:
                self.alarms.pop("backup", None)
                log.warning(
                    "the backup takes writes again", extra=events.about(events.BACKUP_RECOVERED)
                )
            case EventKind.OVERFLOW:
                self._resync()
                self.on_connection_lost()
            case EventKind.CONNECTION_LOST:
                self.on_connection_lost()
            case EventKind.USED:
                for used in self.on_use:
                    used()
            case EventKind.FRONTEND_DOWN:
                sentence = f"the front end has ended (code {event.code})"
                self.alarms.sound("frontend", sentence, events.FRONTEND_DOWN)
                self.on_connection_lost()

    def _drain_ended(self, slab: int, remote: int, generation: int) -> None:
        future = self.drains.pop((slab, remote, generation), None)
        if future is not None and not future.done():
            future.set_result(None)

    def _donor_refused(self, event: EngineEvent) -> None:
        link = self._known_donors.at(event.remote, event.slab)
        if link is None or link.mapped[event.slab].generation != event.generation:
            return
        log.warning("slab %d: donor %s refuses it (code %d)", event.slab, link.address, event.code)
        self._known_donors.backoff.full(link, asyncio.get_running_loop().time())
        link.refused()
        self._refused(link, event.slab)

    def _bad_page(self, event: EngineEvent) -> None:
        if not event.code:
            sentence = f"page {event.value} came back from the backup with other bytes"
            self.alarms.sound("backup-data", sentence, events.BACKUP_DATA)
            return
        link = self._known_donors.at(event.remote, event.slab)
        if link is not None:
            link.bad_page(event.value)

    def _resync(self) -> None:
        """Events were dropped: reads from the engine's state what they would have said."""
        slabs = self._engine.slabs()
        for slab, remote, generation in list(self.drains):
            if not slabs[slab].is_at(remote, generation):
                self._drain_ended(slab, remote, generation)
        down = {info.remote for info in self._engine.remotes() if info.state == "down"}
        for link in self._known_donors.links:
            if link.remote in down:
                link.connections_down(0)
