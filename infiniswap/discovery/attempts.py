# SPDX-License-Identifier: Apache-2.0
"""Repeated attempts to use a broker, and the fault to report until one succeeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, NoReturn

from infiniswap import events
from infiniswap.config import MqttConfig
from infiniswap.discovery import broker
from infiniswap.discovery.announcement import NotOursError
from infiniswap.errors import InfiniswapError
from infiniswap.policy.retry import Backoff, Complaints

log = logging.getLogger(__name__)

_RETRY_S_FIRST: Final = 1.0
_COMPLAIN_S: Final = 600.0


class Attempts:
    """Does something for as long as the connection lasts, again and again.

    Args:
        config: the broker.
        rng: source of randomness.
        retry_s_max: the longest pause between two attempts, in seconds.
        meanwhile: what a failure means; the words before its reason.
        comfort: what still works; the words after it, for the log.

    Attributes:
        problem: why the broker cannot be used, in a sentence; empty while it can.
        versions: the version of MQTT to speak.
    """

    def __init__(
        self,
        config: MqttConfig,
        rng: Random,
        *,
        retry_s_max: float,
        meanwhile: str,
        comfort: str = "",
    ) -> None:
        self.problem = ""
        self.versions = broker.Versions(config.protocol)
        self._config = config
        self._meanwhile = meanwhile
        self._comfort = comfort
        self._backoff = Backoff(_RETRY_S_FIRST, retry_s_max, rng)
        self._complaints = Complaints(_COMPLAIN_S)

    async def keep(
        self,
        attempt: Callable[[], Awaitable[object]],
        changed: Callable[[], None] = lambda: None,
    ) -> NoReturn:
        """Attempts until cancelled.

        Args:
            attempt: raises what is wrong.
            changed: called after each failure.
        """
        while True:
            try:
                await attempt()
            except Exception as error:
                self._failed(error)
                changed()
            await asyncio.sleep(self._backoff.pause_s())

    def good(self) -> None:
        """An attempt has succeeded."""
        self.problem = ""
        self._backoff.good()

    def is_due(self, kind: str) -> bool:
        """Whether such a line may be logged again."""
        return self._complaints.due(kind, asyncio.get_running_loop().time()) is not None

    def ignored(self, text: str, error: NotOursError) -> None:
        """Logs a message that does not count, unless many of its kind were logged."""
        count = self._complaints.due(error.reason, asyncio.get_running_loop().time())
        if count is not None:
            more = f" ({count} more of that kind were not told)" if count else ""
            log.warning("%s: %s%s", broker.where(self._config), text.rstrip("."), more)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, broker.BrokerError) and error.is_protocol:
            self.versions.failed()
        reason = broker.sentence(error)
        fault = None if isinstance(error, InfiniswapError) else error  # of ours
        if fault is not None:
            reason = f"{broker.where(self._config)}: {reason}"
        self.problem = f"{self._meanwhile}: {reason}"
        if self.is_due(self.problem):
            about = events.about(events.BROKER_LOST)
            log.warning("%s%s", self.problem, self._comfort, extra=about, exc_info=fault)
