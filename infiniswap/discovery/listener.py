# SPDX-License-Identifier: Apache-2.0
"""Listens to donors' announcements on a broker, and keeps listening whatever the broker does."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from infiniswap.config import MqttConfig
from infiniswap.discovery import broker
from infiniswap.discovery.announcement import REPEAT_S_UNKEPT, NotOursError, donor_topic
from infiniswap.discovery.attempts import Attempts
from infiniswap.discovery.directory import Directory
from infiniswap.ticks import tick_pause_s

if TYPE_CHECKING:
    from aiomqtt import Client, Message

log = logging.getLogger(__name__)

_RETRY_S_MAX: Final = 30.0
_TICK_S_SETTLING: Final = 0.1
_TICK_S: Final = 1.0
"""What expires does so after minutes."""
_QUIET_S: Final = 0.5
_SETTLE_S_MAX: Final = REPEAT_S_UNKEPT + 1.0
"""What a broker keeps comes at once; what it does not keep is repeated."""


class Listener:
    """Keeps a directory up to date. Everything runs on the event loop.

    Known donors stay known while the broker is away.

    Args:
        config: the broker.
        cluster: name of ours.
        directory: of donors.
        rng: source of randomness.
        changed: called after each change of the directory, of `problem` and of `is_settled`.
        wall: seconds since 1970.

    Attributes:
        is_settled: whether the retained announcements were heard, once at least; or, of a broker
            that keeps none, those that are repeated.
        complaints: messages that did not count, the last sentence of each kind.
    """

    def __init__(
        self,
        config: MqttConfig,
        cluster: str,
        directory: Directory,
        rng: Random,
        changed: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.is_settled = False
        self.complaints: dict[str, str] = {}
        self._config = config
        self._cluster = cluster
        self._directory = directory
        self._changed = changed
        self._wall = wall
        self._attempts = Attempts(
            config,
            rng,
            retry_s_max=_RETRY_S_MAX,
            meanwhile="donors that come are not heard of",
            comfort="; those that are known stay known",
        )
        self._heard_s = 0.0
        self._has_kept = False

    @property
    def problem(self) -> str:
        """Why no new donor is heard of, in a sentence; empty while donors are."""
        return self._attempts.problem

    async def run(self) -> None:
        """Listens until cancelled."""
        await self._attempts.keep(lambda: self._listen(lambda: False), self._changed)

    async def once(self) -> None:
        """Listens until the retained announcements were heard. Bounded.

        Raises:
            InfiniswapError: what is wrong with the broker or with its keys.
        """
        try:
            await self._listen(lambda: self.is_settled)
        except broker.BrokerError as error:
            if not error.is_protocol or self._config.protocol != "auto":
                raise
            self._attempts.versions.failed()
            await self._listen(lambda: self.is_settled)

    async def _listen(self, is_enough: Callable[[], bool]) -> None:
        """Listens until the connection is lost, or that is enough."""
        context = await asyncio.to_thread(broker.tls_context, self._config)
        await broker.knock(self._config, context)
        name = f"isw{secrets.token_hex(8)}"
        async with broker.connected(
            self._config, context, name, self._attempts.versions.now, sink=self._heard
        ) as client:
            self._heard_s = asyncio.get_running_loop().time()
            self._has_kept = False
            # QoS 0: messages to be acknowledged wait in a queue of the broker (Mosquitto: 1000),
            # which drops those that a flood leaves no room for.
            answer = await client.subscribe(donor_topic(self._cluster, "+", "+"), qos=0)
            refusal = broker.refused(self._config, answer)
            if refusal is not None:
                raise refusal
            started_s = asyncio.get_running_loop().time()
            self._directory.connected(started_s)
            lost = asyncio.create_task(_lost(client), name="broker lost")
            try:
                while not is_enough():
                    done, _ = await asyncio.wait({lost}, timeout=self._pause_s())
                    if done:
                        await lost
                    self._tick(started_s)
            finally:
                lost.cancel()
                await asyncio.wait({lost})

    def _pause_s(self) -> float:
        if self.problem or not self.is_settled:
            return _TICK_S_SETTLING
        return tick_pause_s(asyncio.get_running_loop().time(), _TICK_S)

    def _tick(self, started_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        is_quiet = self._has_kept and now_s - self._heard_s > _QUIET_S
        is_quiet = is_quiet or now_s - started_s > _SETTLE_S_MAX
        is_changed = self._directory.expire(now_s)
        if is_quiet and (self.problem or not self.is_settled):
            if self.problem:
                log.info("%s is heard again", broker.where(self._config))
            self._attempts.good()
            self.is_settled = is_changed = True
        if is_changed:
            self._changed()

    def _heard(self, message: Message) -> None:
        now_s = self._heard_s = asyncio.get_running_loop().time()
        self._has_kept |= bool(message.retain)
        topic = str(message.topic)
        try:
            if self._directory.take(
                topic, message.payload, now_s, self._wall(), is_kept=message.retain
            ):
                self._changed()
        except NotOursError as error:
            text = f"{ascii(topic)[1:-1][:200]}: {error}"
            self.complaints[error.reason] = text
            self._attempts.ignored(f"ignored: {text}", error)


async def _lost(client: Client) -> None:
    """Ends, by an error that says why, with the connection."""
    async for _ in client.messages:
        pass
