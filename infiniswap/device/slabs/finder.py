# SPDX-License-Identifier: Apache-2.0
"""Who exists, for a device: donors that are named, in a file that may change, or on a broker.

No page and no slab that has a donor waits for anything here: links are added, and those that nobody
would miss are taken away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.discovery.static import PeersFile, union
from infiniswap.ticks import tick_pause_s
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.discovery.order import Order
    from infiniswap.discovery.watcher import Watcher

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_FIRST_S_MAX: Final = 10.0


class Finder:
    """The donors of one device. Everything runs on the event loop but reading the file.

    Args:
        spec: names the sources.
        blocking: runs a call that blocks outside of the event loop.
        make_watcher: makes what listens to the broker; None: as a process of its own.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        blocking: Callable[[Callable[[], bool]], Awaitable[bool]],
        make_watcher: Callable[[DeviceSpec, Callable[[], None]], Watcher] | None = None,
    ) -> None:
        self._spec = spec
        self._blocking = blocking
        cluster = spec.config.cluster
        self._file = None if cluster.peers_file is None else PeersFile(cluster.peers_file)
        self._changed = asyncio.Event()
        self._watcher = (
            (make_watcher or _watcher)(spec, self._changed.set)
            if cluster.discovery == "mqtt"
            else None
        )
        self._begin_following: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Begins, before anything is attached. Waits for the broker only if no donor is named.

        Raises:
            ConfigError: the file of peers cannot be read.
        """
        if self._file is not None:
            self._file.load()
        if self._watcher is not None:
            self._watcher.start()
            if not self.named():
                await self._watcher.first(_FIRST_S_MAX)

    def named(self) -> tuple[HostPort, ...]:
        """Donors that the configuration or the file of peers names."""
        return union(
            self._spec.config.cluster.peers, () if self._file is None else self._file.peers
        )

    def announced(self) -> tuple[HostPort, ...]:
        """Donors that announce themselves, and are not named."""
        named = set(self.named())
        donors = () if self._watcher is None else self._watcher.donors
        return tuple(donor for donor in donors if donor not in named)

    def degraded(self) -> list[str]:
        """What keeps donors from being found, in sentences."""
        found = [self._file.problem] if self._file is not None else []
        if self._watcher is not None:
            found += [self._watcher.problem, *self._watcher.notes]
        return [sentence for sentence in found if sentence]

    def start(
        self,
        spec: DeviceSpec,
        known_donors: KnownDonors,
        make_link: Callable[[HostPort], DonorLink],
    ) -> None:
        """Gets links to the donors that are known. `spec`: as it is by now; others may
        be named than when this was made."""
        self._spec = spec
        self._know(known_donors, make_link)
        self._begin_following = partial(self._follow, known_donors, make_link)

    def follow(self) -> None:
        """Keeps the links up to date from now on. That may execute a program: nothing for somebody
        who takes a device over, and does not serve yet."""
        self._begin_following()

    def _follow(
        self, known_donors: KnownDonors, make_link: Callable[[HostPort], DonorLink]
    ) -> None:
        if self._watcher is not None:
            self._watcher.start()
        if self._file is not None or self._watcher is not None:
            self._task = asyncio.create_task(self._run(known_donors, make_link), name="finder")

    def tell(
        self,
        spec: DeviceSpec,
        known_donors: KnownDonors,
        make_link: Callable[[HostPort], DonorLink],
        *,
        has_other_keys: bool = False,
    ) -> None:
        """Others are named now; file and broker are as before."""
        self._spec = spec
        if has_other_keys and self._watcher is not None:
            self._watcher.restart(_order(spec))
        self._know(known_donors, make_link)

    async def close(self) -> None:
        """Ends what `begin` and `start` began. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        if self._watcher is not None:
            await self._watcher.close()

    def _know(self, known_donors: KnownDonors, make_link: Callable[[HostPort], DonorLink]) -> None:
        # A successor takes donors over before it has heard of anybody, maybe with the broker away.
        is_deaf = self._watcher is not None and not self._watcher.has_heard
        inherited = (
            [link.address for link in known_donors.links if link.is_listed] if is_deaf else []
        )
        known_donors.know(union(self.named(), self.announced(), inherited), make_link)

    async def _run(
        self, known_donors: KnownDonors, make_link: Callable[[HostPort], DonorLink]
    ) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    tick_pause_s(asyncio.get_running_loop().time(), _LOOK_S)
                ):
                    await self._changed.wait()
            self._changed.clear()
            try:
                if self._file is not None:
                    await self._blocking(self._file.look)
                self._know(known_donors, make_link)
            except Exception:
                log.exception("donors cannot be looked for; it is tried again")
                await asyncio.sleep(_LOOK_S)


def _watcher(spec: DeviceSpec, changed: Callable[[], None]) -> Watcher:
    # Late: a device whose donors are all named has no use for it. But not later than this: a
    # successor has loaded everything before its turn comes.
    from infiniswap.discovery.watcher import Watcher

    return Watcher(_order(spec), random.Random(), changed)


def _order(spec: DeviceSpec) -> Order:
    from infiniswap.discovery.order import Order

    config, cluster = spec.config, spec.config.cluster
    first, second = cluster.secret_file, cluster.second_secret_file
    return Order(
        device=spec.name,
        mqtt=config.mqtt,
        cluster=cluster.name,
        secret_file=None if first is None else str(first),
        second_secret_file=None if second is None else str(second),
        state_dir=str(config.daemon.state_dir),
        slab_bytes=config.device.slab_bytes,
    )
