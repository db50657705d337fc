# SPDX-License-Identifier: Apache-2.0
"""A daemon's configuration, read again while it runs (SIGHUP).

Keys of leases, ports and the store wait for a restart. If the other new values are only valid
together with those, all keys wait. A file with a mistake changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from infiniswap.config import Config
from infiniswap.config_changes import SECRETS_CHANGED, Outcome, merged
from infiniswap.control.key_ring import KeyRing
from infiniswap.donor.cluster_keys import donor_keys, second_keys
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.pool_limits import pool_limits
from infiniswap.donor.service import DonorService
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.keys import Keys
from infiniswap.policy.headroom import HeadroomConfig
from infiniswap.secret import check_listen_secret
from infiniswap.system.keep_awake import KeepAwake

log = logging.getLogger(__name__)


class Reloader:
    """The configuration in force, and its change.

    Args:
        config: the one that the daemon was started with.
        harvester, service, keep_awake, keys: what is changed.
    """

    def __init__(
        self,
        config: Config,
        harvester: Harvester,
        service: DonorService,
        keep_awake: KeepAwake,
        keys: KeyRing,
    ) -> None:
        self.look_at_certificates: Callable[[], Awaitable[tuple[str, ...]]] | None = None
        """Reads them again; returns what is new. None: there is a secret."""
        self._config = config
        self._harvester = harvester
        self._service = service
        self._keep_awake = keep_awake
        self._keys = keys
        # The store has room for so many, whatever is configured later.
        self._slabs_max = harvester.policy.config.slabs_max

    async def reload(self, load: Callable[[], Config]) -> Outcome:
        """Reads the configuration and applies what can be applied; never raises for its contents.

        Args:
            load: reads it; blocking.
        """
        loop = asyncio.get_running_loop()
        try:
            before = self._config
            wanted, first, second = await loop.run_in_executor(None, lambda: _load(load, before))
            await self._harvester.refresh(0.0)
            pool_limits(wanted, self._harvester.figures)
            outcome = self._take_over(wanted)
            outcome = replace(outcome, contents=await self._contents(first, second))
        except InfiniswapError as error:
            outcome = Outcome(error=error)
        outcome.log("daemon")
        self._service.degraded["reload"] = outcome.sentences("daemon")
        return outcome

    async def _contents(self, first: Keys | None, second: Keys | None) -> tuple[str, ...]:
        """Takes over what the files have under the same names, whatever else waits."""
        if self.look_at_certificates is not None:
            return await self.look_at_certificates()
        return (SECRETS_CHANGED,) if self._keys.change(first, second) else ()

    def _take_over(self, wanted: Config) -> Outcome:
        before = self._config
        if _changes_mode(before, wanted):
            return Outcome.between(before, before, wanted, "daemon")
        try:
            config = merged(before, wanted, "daemon")
            limits = pool_limits(config, self._harvester.figures)
        except ConfigError:
            # These values are only valid together with others that wait for a restart.
            return Outcome.between(before, before, wanted, "daemon")
        is_capped = limits.slabs_max > self._slabs_max
        if is_capped:
            limits = replace(limits, pool_bytes_max=self._slabs_max * limits.slab_bytes)
        self._apply(config, limits)
        self._config = config
        outcome = Outcome.between(before, config, wanted, "daemon")
        if is_capped:
            waiting = tuple(dict.fromkeys(("daemon.pool", *outcome.waiting)))
            outcome = replace(outcome, waiting=waiting)
        return outcome

    def _apply(self, config: Config, limits: HeadroomConfig) -> None:
        self._harvester.policy.limit(limits)
        self._service.reconfigure(config)
        self._keep_awake.set_mode(config.daemon.keep_awake)


def _load(load: Callable[[], Config], before: Config) -> tuple[Config, Keys | None, Keys | None]:
    """The configuration, and the keys that count from now on."""
    config = load()
    check_listen_secret(config.daemon.listen, config.cluster.trust_file)
    source = before if _changes_mode(before, config) else config
    if source.cluster.ca_file is not None:
        return config, None, None
    return config, donor_keys(source), second_keys(source)


def _changes_mode(before: Config, wanted: Config) -> bool:
    """Between secret and certificates, which waits for a restart with everything else."""
    return (before.cluster.ca_file is None) != (wanted.cluster.ca_file is None)
