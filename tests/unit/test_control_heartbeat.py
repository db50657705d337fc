# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.channel: how often the ends of a session at rest hear of each other, and when
one of them counts as gone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import aiohttp
import pytest
from support.machine.virtual_time import in_virtual_time

from infiniswap.control import messages as m
from infiniswap.control.channel import Channel, Limits

DELAY_S = 0.001


class End:
    """One end of a connection.

    Attributes:
        sent: types of the messages sent.
        is_mute: what it sends does not arrive any longer.
    """

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.is_mute = False
        self.other = self
        self._arrived: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()

    async def receive(self) -> aiohttp.WSMessage:
        return await self._arrived.get()

    async def send_str(self, text: str) -> None:
        self.sent.append(text.partition('"type":"')[2].partition('"')[0])
        if not self.is_mute:
            message = aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, text, None)
            loop = asyncio.get_running_loop()
            loop.call_later(DELAY_S, self.other._arrived.put_nowait, message)

    async def close(self) -> None: ...


class Pair:
    """A session at rest: consumer and donor."""

    def __init__(self, limits: Limits, *, donor_pings: bool = False) -> None:
        self.consumer, self.donor = End(), End()
        self.consumer.other, self.donor.other = self.donor, self.consumer
        self.channels = (
            _channel(self.consumer, m.decode_to_consumer, limits, pings=True),
            _channel(self.donor, m.decode_to_donor, limits, pings=donor_pings),
        )
        self.tasks: list[asyncio.Task[Any]] = []

    async def run(self, apart_s: float) -> None:
        """The donor's end begins so much later."""
        for channel in self.channels:
            self.tasks.append(asyncio.create_task(channel.run(), name="channel"))
            await asyncio.sleep(apart_s)

    async def end(self) -> None:
        for channel in self.channels:
            channel.end(m.GOODBYE_SHUTDOWN)
        await asyncio.wait(self.tasks)


def _channel(end: End, decode: Any, limits: Limits, *, pings: bool) -> Channel:
    async def handle(request: Any) -> m.OkAnswer:
        return m.OkAnswer(id=request.id)

    return Channel(
        cast(Any, end),
        decode=decode,
        handle=handle,
        notice=lambda message: None,
        peer="the other end",
        limits=limits,
        pings=pings,
    )


@pytest.mark.parametrize("apart_s", [0.0, 0.5, 0.9])
@in_virtual_time
async def test_one_ping_and_one_pong_a_heartbeat_keep_a_session(apart_s: float) -> None:
    pair = Pair(Limits())
    await pair.run(apart_s)
    await asyncio.sleep(60.05)
    assert [channel.ended for channel in pair.channels] == [None, None]
    assert set(pair.consumer.sent) == {"ping"}
    assert pair.donor.sent.count("pong") == len(pair.consumer.sent) == pytest.approx(60, abs=2)
    assert pair.donor.sent.count("ping") <= 1
    await pair.end()


@in_virtual_time
async def test_a_consumer_that_does_not_ping_is_asked() -> None:
    pair = Pair(Limits())
    silent, donor = pair.channels
    silent._ping_from = 1_000_000
    await pair.run(0.3)
    await asyncio.sleep(60.05)
    assert donor.ended is None
    assert pair.donor.sent.count("ping") == pytest.approx(30, abs=2)
    assert pair.consumer.sent.count("pong") == pair.donor.sent.count("ping")
    await pair.end()


@pytest.mark.parametrize("missed_max", [1, 2, 5])
@in_virtual_time
async def test_who_is_silent_counts_as_gone_as_soon_as_before(missed_max: int) -> None:
    for mute in (0, 1):
        pair = Pair(Limits(missed_max=missed_max))
        await pair.run(0.3)
        await asyncio.sleep(20.0)
        assert [channel.ended for channel in pair.channels] == [None, None]
        (pair.consumer, pair.donor)[mute].is_mute = True
        begun_s = asyncio.get_running_loop().time()
        ended = await pair.channels[1 - mute].wait_ended()
        assert ended.reason == m.GOODBYE_SILENCE
        took_s = asyncio.get_running_loop().time() - begun_s
        assert missed_max - 1e-6 <= took_s <= missed_max + 1 + 1e-6
        await pair.end()
