# SPDX-License-Identifier: Apache-2.0
"""Listens to what donors announce on a broker, and keeps listening whatever the broker does."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from infiniswap import events
from infiniswap.config import MqttConfig
from infiniswap.discovery import broker
from infiniswap.discovery.announcement import NotOursError, donor_topic
from infiniswap.discovery.directory import Directory
from infiniswap.errors import InfiniswapError
from infiniswap.policy.retry import Backoff, Complaints

if TYPE_CHECKING:
    from aiomqtt import Client, Message

log = logging.getLogger(__name__)

_RETRY_S_FIRST: Final = 1.0
_RETRY_S_MAX: Final = 30.0
_COMPLAIN_S: Final = 600.0
_TICK_S: Final = 0.1
_QUIET_S: Final = 0.5
_SETTLE_S_MAX: Final = 5.0


class Listener:
    """Keeps a directory up to date. Everything runs on the event loop.

    What was known stays known while the broker is away.

    Args:
        config: the broker.
        cluster: name of ours.
        directory: of donors.
        rng: source of randomness.
        changed: called after each change of the directory, of `problem` and of `is_settled`.

    Attributes:
        problem: why nothing new is heard, in a sentence; empty while it is.
        is_settled: whether what the broker had retained was heard, once at least.
        complaints: what did not count, the last sentence of each kind.
    """

    def __init__(
        self,
        config: MqttConfig,
        cluster: str,
        directory: Directory,
        rng: Random,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.problem = ""
        self.is_settled = False
        self.complaints: dict[str, str] = {}
        self._config = config
        self._cluster = cluster
        self._directory = directory
        self._changed = changed
        self._backoff = Backoff(_RETRY_S_FIRST, _RETRY_S_MAX, rng)
        self._due = Complaints(_COMPLAIN_S)
        self._versions = broker.Versions(config.protocol)
        self._heard_s = 0.0

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            try:
                await self._listen(lambda: False)
            except Exception as error:
                self._failed(error)
            await asyncio.sleep(self._backoff.pause_s())

    async def once(self) -> None:
        """Until what the broker has retained was heard. Bounded.

        Raises:
            InfiniswapError: what is wrong with the broker or with its keys.
        """
        try:
            await self._listen(lambda: self.is_settled)
        except broker.BrokerError as error:
            if not error.is_protocol or self._config.protocol != "auto":
                raise
            self._versions.failed()
            await self._listen(lambda: self.is_settled)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, broker.BrokerError) and error.is_protocol:
            self._versions.failed()
        text = broker.sentence(error)
        if not isinstance(error, InfiniswapError):
            text = f"{broker.where(self._config)}: {text}"
        self.problem = f"donors that come are not heard of: {text}"
        if self._due.due(text, asyncio.get_running_loop().time()) is not None:
            about = events.about(events.BROKER_LOST)
            log.warning("%s; those that are known stay known", self.problem, extra=about)
        self._changed()

    async def _listen(self, is_enough: Callable[[], bool]) -> None:
        """Until the connection is lost, or that is enough."""
        context = await asyncio.to_thread(broker.tls_context, self._config)
        await broker.knock(self._config, context)
        name = f"isw{secrets.token_hex(8)}"
        async with broker.connected(
            self._config, context, name, self._versions.now, sink=self._heard
        ) as client:
            self._heard_s = asyncio.get_running_loop().time()
            # QoS 0: for what is to be acknowledged a broker has a queue (Mosquitto of 1000), and
            # throws away what a flood leaves no room for.
            answer = await client.subscribe(donor_topic(self._cluster, "+", "+"), qos=0)
            refusal = broker.refused(self._config, answer)
            if refusal is not None:
                raise refusal
            started_s = asyncio.get_running_loop().time()
            self._directory.connected(started_s)
            lost = asyncio.create_task(_lost(client), name="broker lost")
            try:
                while not is_enough():
                    done, _ = await asyncio.wait({lost}, timeout=_TICK_S)
                    if done:
                        await lost
                    self._tick(started_s)
            finally:
                lost.cancel()
                await asyncio.wait({lost})

    def _tick(self, started_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        is_quiet = now_s - self._heard_s > _QUIET_S or now_s - started_s > _SETTLE_S_MAX
        is_changed = self._directory.expire(now_s)
        if is_quiet and (self.problem or not self.is_settled):
            if self.problem:
                log.info("%s is heard again", broker.where(self._config))
            self._backoff.good()
            self.problem, self.is_settled, is_changed = "", True, True
        if is_changed:
            self._changed()

    def _heard(self, message: Message) -> None:
        now_s = self._heard_s = asyncio.get_running_loop().time()
        topic = str(message.topic)
        try:
            if self._directory.take(topic, message.payload, now_s):
                self._changed()
        except NotOursError as error:
            text = f"{ascii(topic)[1:-1][:200]}: {error}"
            self.complaints[error.reason] = text
            if (count := self._due.due(error.reason, now_s)) is not None:
                more = f" ({count} more of that kind were not told)" if count else ""
                log.warning("%s: ignored: %s%s", broker.where(self._config), text.rstrip("."), more)


async def _lost(client: Client) -> None:
    """Ends, by an error that says why, with the connection."""
    async for _ in client.messages:
        pass
