# SPDX-License-Identifier: Apache-2.0
"""What a daemon asks of a broker, tried once and without announcing anybody."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

from infiniswap.config import MqttConfig
from infiniswap.discovery import broker
from infiniswap.discovery.announcement import Withdrawal, donor_topic, encode
from infiniswap.discovery.announcer import ECHO_S_MAX, may_not_retain

if TYPE_CHECKING:
    from aiomqtt import Client


async def rehearse(config: MqttConfig, cluster: str, donor_id: str, key: bytes | None) -> bool:
    """Connects as the daemon of this host does, with a will, and sends a message under its topic,
    which has to come back: the end of a session that never was, so that it means nothing to others.

    Returns:
        Whether the broker keeps retained messages.

    Raises:
        ConfigError: a file that [mqtt] names cannot be used.
        BrokerError: what a daemon would fail with, too.
    """
    versions = broker.Versions(config.protocol)
    try:
        return await _as_daemon(config, cluster, donor_id, key, versions.now)
    except broker.BrokerError as error:
        if not error.is_protocol or config.protocol != "auto":
            raise
        versions.failed()
        return await _as_daemon(config, cluster, donor_id, key, versions.now)


async def _as_daemon(
    config: MqttConfig, cluster: str, donor_id: str, key: bytes | None, version: str
) -> bool:
    try:
        await _once(config, cluster, donor_id, key, version, retain=True)
    except broker.BrokerError as error:
        if not may_not_retain(error, version):
            raise
        await _once(config, cluster, donor_id, key, version, retain=False)
        return False
    return True


async def _once(
    config: MqttConfig,
    cluster: str,
    donor_id: str,
    key: bytes | None,
    version: str,
    *,
    retain: bool,
) -> None:
    context = await asyncio.to_thread(broker.tls_context, config)
    await broker.knock(config, context)
    session = secrets.token_hex(8)
    topic = donor_topic(cluster, donor_id, session)
    said = encode(Withdrawal(cluster=cluster, donor_id=donor_id, session=session), key)
    will = broker.Will(topic, said, retain)
    refusals: list[str] = []
    async with broker.connected(
        config, context, f"isw{session}", version, will=will, refused=refusals.append
    ) as client:
        answer = await client.subscribe(donor_topic(cluster, donor_id, "+"), qos=1)
        if (refusal := broker.refused(config, answer)) is not None:
            raise refusal
        await client.publish(topic, said, qos=1, retain=retain)
        if refusals:
            raise broker.not_taken(config, refusals[0])
        try:
            async with asyncio.timeout(ECHO_S_MAX):
                await _heard(client, topic)
        except TimeoutError:
            raise broker.not_seen(config, version) from None
        finally:
            if retain:
                with contextlib.suppress(Exception):
                    await client.publish(topic, b"", qos=1, retain=True)


async def _heard(client: Client, topic: str) -> None:
    async for message in client.messages:
        if str(message.topic) == topic:
            return
