# SPDX-License-Identifier: Apache-2.0
"""Asks the cluster's donors while somebody watches the page, once for all who do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infiniswap.errors import InfiniswapError
from infiniswap.ui import model as made
from infiniswap.watch.asking import AskedDonor
from infiniswap.watch.changes import between
from infiniswap.watch.picture import Picture, look

if TYPE_CHECKING:
    from infiniswap.control.messages import Status
    from infiniswap.discovery.find import Found
    from infiniswap.units import HostPort

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""Between two looks."""
FIND_S: Final = 30.0
"""Between two questions which donors there are."""
LINGER_S: Final = 60.0
"""The watch goes on for this long after the last viewer has left: a reload shows no gap."""
SAMPLES_MAX: Final = 150
"""Of the charts: five minutes."""
EVENTS_MAX: Final = 200

Ask = Callable[[Sequence["HostPort"]], Awaitable[list[AskedDonor]]]


class ClusterWatch:
    """One watch for all viewers of a daemon. It runs while there is one.

    Args:
        own: address and status of this daemon.
        find: which donors there are; blocking.
        ask: asks those for their status.
        look_s, linger_s: see LOOK_S, LINGER_S.
    """

    def __init__(
        self,
        own: Callable[[], Awaitable[tuple[HostPort, Status]]],
        find: Callable[[], Found],
        ask: Ask,
        look_s: float = LOOK_S,
        linger_s: float = LINGER_S,
    ) -> None:
        self._own = own
        self._find = find
        self._ask = ask
        self._look_s = look_s
        self._linger_s = linger_s
        self._found: Found | None = None
        self._found_at_s = 0.0
        self._picture: Picture | None = None
        self._views: dict[str, made.DeviceView] = {}
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_MAX)
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._events_count = 0  # of all that there were
        self._last: dict[str, Any] | None = None
        self._looked = asyncio.Condition()
        self._viewers = 0
        self._left_s = 0.0
        self._has_stopped = False
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def viewer(self) -> Any:
        """Somebody watches while the block lasts; yields the messages.

        Raises:
            ConnectionError: the daemon stops.
        """
        if self._has_stopped:
            raise ConnectionError("the daemon stops")
        self._viewers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="page")
        try:
            yield self._messages()
        finally:
            self._viewers -= 1
            self._left_s = time.monotonic()

    async def _messages(self) -> Any:
        """The past, then each look as it is made. A viewer that is slow misses some looks, and no
        event but where there are more than EVENTS_MAX."""
        told = self._events_count
        yield msgspec.json.encode(
            {
                "kind": "past",
                "look_s": self._look_s,
                "samples": list(self._samples),
                "events": list(self._events),
            }
        )
        seen: dict[str, Any] | None = None
        while True:
            async with self._looked:
                while self._last is seen:
                    await self._looked.wait()
                seen = self._last
            new, told = self._events_count - told, self._events_count
            events = list(self._events)[-new:] if new else []
            yield msgspec.json.encode({**(seen or {}), "events": events})

    async def stop(self) -> None:
        """Ends the watch. Idempotent."""
        self._has_stopped = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        while self._viewers or time.monotonic() - self._left_s < self._linger_s:
            try:
                await self._look()
            except Exception:  # a donor's daemon must not end for a page
                log.exception("the page's look at the cluster failed; it is tried again")
            await asyncio.sleep(self._look_s)
        self._picture, self._last, self._views = None, None, {}
        self._samples.clear()

    async def _look(self) -> None:
        now_s = time.monotonic()
        if self._found is None or now_s - self._found_at_s >= FIND_S:
            self._found, self._found_at_s = await self._found_now(), now_s
        address, status = await self._own()
        others = [other for other in self._found.addresses if other != address]
        rows = [AskedDonor(address, status, "")]
        # This one may be announced, or named, by another address.
        rows += [
            row
            for row in await self._ask(others)
            if row.status is None or row.status.donor_id != status.donor_id
        ]
        self._take(rows, self._found.problems)
        async with self._looked:
            self._looked.notify_all()

    async def _found_now(self) -> Found:
        """Which donors there are. Where the list cannot be read, those found last stay."""
        from infiniswap.discovery.find import Found

        try:
            return await asyncio.to_thread(self._find)
        except InfiniswapError as error:
            return replace(self._found or Found(()), failure=error)

    def _take(self, rows: list[AskedDonor], problems: Sequence[str]) -> None:
        at_s = time.time()
        before, views = self._picture, self._views
        self._picture = now = look(before, rows, (), problems, time.monotonic())
        self._views = made.devices(now, views)
        if before is not None:
            names = {
                address: heard.status.donor_name
                for address, heard in now.heard.items()
                if heard.status is not None
            }
            changes = [*between(before, now), *made.slab_changes(views, self._views, names)]
            self._events.extend(made.told(change, at_s) for change in changes)
            self._events_count += len(changes)
        drawn = made.model(now, self._views)
        sample = made.sample(drawn, at_s)
        self._samples.append(sample)
        self._last = {
            "kind": "look",
            "at_s": sample["at_s"],
            "by": rows[0].status.donor_name if rows[0].status else "",
            "sample": sample,
            **drawn,
        }
