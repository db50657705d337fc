# SPDX-License-Identifier: Apache-2.0
"""A donor's certificate of the cluster's authority, renewed by others while the daemon runs."""

from __future__ import annotations

import asyncio
import time

from infiniswap.config import Config
from infiniswap.control.pki import LOOK_S, CertificateWatch, Credentials, check_date
from infiniswap.control.roles import Role
from infiniswap.control.server import ControlServer
from infiniswap.control.tls import ServerTls


class DonorCredentials:
    """Looked at every few seconds and at each reload. Everything runs on the event loop but the
    reading of files.

    Args:
        watch: of the files.

    Attributes:
        degraded: sentences for the status.
    """

    def __init__(self, watch: CertificateWatch) -> None:
        self._watch = watch
        self._reading = asyncio.Lock()
        self.degraded: list[str] = watch.sentences()

    @property
    def tls(self) -> ServerTls:
        """What the control port shows now."""
        found = self._watch.now.server
        assert found is not None, "it was loaded for a donor"
        return found

    @property
    def client(self) -> Credentials:
        """What this host shows other donors."""
        return self._watch.now

    async def look(self, server: ControlServer, *, at_once: bool = False) -> tuple[str, ...]:
        """Takes files over that have changed, and ends sessions whose certificates no longer count.

        Args:
            server: shows them.
            at_once: the files are complete, as somebody has asked for it.

        Returns:
            What is new of the files, as sentences.
        """
        async with self._reading:
            has_changed = await asyncio.to_thread(self._watch.look, at_once=at_once)
            if has_changed:
                server.use_tls(self.tls)
            now_s = time.time()
            # Consumers would not take our own certificate either: nobody could come back. Perhaps
            # the clock is wrong.
            server.end_given_up(None if self._watch.now.problem(now_s) else now_s)
            self.degraded[:] = self._watch.sentences()
        return self._watch.news(has_changed=has_changed)

    async def run(self, server: ControlServer) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(server)


def donor_credentials(config: Config) -> DonorCredentials | None:
    """Those of the configured files; None: the cluster has a secret. Blocking.

    Raises:
        ConfigError: they cannot be used, or are out of date.
    """
    files = config.certificates()
    if files is None:
        return None
    watch = CertificateWatch(files, config.cluster.name, Role.DONOR)
    check_date(watch.now)
    return DonorCredentials(watch)
