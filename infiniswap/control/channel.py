# SPDX-License-Identifier: Apache-2.0
"""One open session, the same at both ends: answers to requests, heartbeats, bounds.

Both ends count the heartbeats in which they heard nothing. The consumer sends a ping every
heartbeat, which the donor answers; the donor sends one only after a heartbeat in which it heard
nothing. Counting ticks instead of comparing clocks keeps a session alive whose own process was
stopped for a while: after the pause one tick passes, and the peer's messages of that time are read
before the next.

Unrequested messages of a peer cost this end time, so they are counted: a peer that sends more than
an honest one could loses its session (GOODBYE_FLOOD).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from msgspec import Struct

from infiniswap.control import messages as m
from infiniswap.control.http import aiohttp, web
from infiniswap.control.rate import Rate, RateLimit
from infiniswap.control.text import clean_text
from infiniswap.errors import (
    DeadlineError,
    InfiniswapError,
    ProtocolMismatchError,
    RequestRefusedError,
    SessionLostError,
)
from infiniswap.ticks import next_tick

log = logging.getLogger(__name__)

WebSocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse
AnswerT = TypeVar("AnswerT", bound=m.Answer)

LOST: Final = "lost"
"""Reason of a session whose connection ended without a goodbye."""

HURRIED_S: Final = 0.5
"""How long a peer that breaks the protocol may take to agree to the close: until then everything
that it sends is still read."""

_BEATS_PER_HEARTBEAT: Final = 10
"""Allowed. An honest peer sends a ping and a pong, and now and then a notice."""
_PONG_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a session.

    Attributes:
        heartbeat_s: distance of pings.
        missed_max: heartbeats without a message from the peer, before it counts as gone.
        send_s: how long one message may take to leave.
        handling_max: requests of the peer worked on at once, their answers sent; more are refused
            as busy.
        beats_burst: heartbeats and notices of the peer at once: those that were queued while this
            process was stopped are fewer.
        bytes: from the peer, whether they become messages or not: endless fragments do not.
        requests: of the peer, and unexpected answers. An honest peer sends at most three for a
            slab, or one to evict it.
    """

    heartbeat_s: float = 1.0
    missed_max: int = 5
    send_s: float = 5.0
    handling_max: int = 64
    beats_burst: int = 256
    bytes: Rate = Rate(32 * m.MESSAGE_BYTES_MAX, 4.0 * m.MESSAGE_BYTES_MAX)
    requests: Rate = Rate(4096, 200.0)

    @property
    def beats(self) -> Rate:
        """Heartbeats and notices of the peer."""
        return Rate(self.beats_burst, _BEATS_PER_HEARTBEAT / self.heartbeat_s)


class FloodError(ProtocolMismatchError):
    """The peer sends more than its limits allow."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a session ended.

    Attributes:
        reason: one of GOODBYE_REASONS, or LOST.
        detail: for people; may be empty.
        by_peer: who ended it.
    """

    reason: str
    detail: str
    by_peer: bool

    @property
    def is_broken(self) -> bool:
        """Whether this end has ended it because of the peer's messages."""
        return self.reason in (m.GOODBYE_PROTOCOL, m.GOODBYE_FLOOD) and not self.by_peer


def _no_session() -> None:
    raise ProtocolMismatchError("a ping before the session is open")


async def receive(
    ws: WebSocket,
    bytes_max: int = m.MESSAGE_BYTES_MAX,
    beaten: Callable[[], None] = _no_session,
) -> str | None:
    """The next text frame; None when the peer closed the connection.

    Args:
        ws: the connection, which leaves pings to us (`autoping=False`): they have to be counted.
        bytes_max: of the frame.
        beaten: called for each ping and pong of WebSocket itself; may raise.

    Raises:
        ProtocolMismatchError: a frame that is too long or no text.
    """
    while (frame := await ws.receive()).type in (aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG):
        beaten()
        if frame.type is aiohttp.WSMsgType.PING and not await _pong(ws, frame.data):
            return None
    if frame.type is aiohttp.WSMsgType.TEXT:
        text = str(frame.data)
        if len(text) > bytes_max:
            raise ProtocolMismatchError(f"a message of more than {bytes_max} bytes")
        return text
    if frame.type is aiohttp.WSMsgType.ERROR:
        raise ProtocolMismatchError(f"a frame that cannot be read ({clean_text(str(frame.data))})")
    if frame.type is aiohttp.WSMsgType.BINARY:
        raise ProtocolMismatchError("a binary frame; messages are text")
    return None


async def send(ws: WebSocket, message: Struct, send_s: float) -> bool:
    """Sends one message; False when the connection is gone or stuck."""
    try:
        async with asyncio.timeout(send_s):
            await ws.send_str(m.encode(message).decode())
    except (TimeoutError, ConnectionError, RuntimeError, aiohttp.ClientError):
        return False
    return True


def bytes_received(ws: WebSocket) -> int:
    """From the peer since the connection was made; 0 where the kernel does not count them."""
    try:
        info = ws.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    except (AttributeError, OSError):  # no TCP, or closed
        return 0
    return int.from_bytes(info[128:136], sys.byteorder)  # tcpi_bytes_received, linux/tcp.h


async def _pong(ws: WebSocket, data: bytes) -> bool:
    try:
        async with asyncio.timeout(_PONG_S):
            await ws.pong(data)
    except (TimeoutError, ConnectionError, RuntimeError, aiohttp.ClientError):
        return False
    return True


async def close(ws: WebSocket, wait_s: float) -> None:
    """Closes the connection, with a bounded wait for the peer's agreement."""
    try:
        async with asyncio.timeout(wait_s):
            await ws.close()
    except (TimeoutError, ConnectionError, RuntimeError, aiohttp.ClientError):
        log.debug("closing a session: the peer did not agree in time")


class Channel:
    """Frames of one open session.

    Args:
        ws: the connection, handshake done.
        decode: turns a frame into a message; raises ProtocolMismatchError.
        handle: carries a request out and returns its answer. An InfiniswapError becomes a refusal
            (a RequestRefusedError with its reason). It must end without help: `run` waits for it.
        notice: takes messages that have no answer (DrainNotice). Must not raise.
        peer: address or name of the peer, for messages.
        limits: bounds.
        unawaited: takes unexpected answers: late, or repeated. Must not raise.
        surplus: takes requests beyond `handling_max`, which are refused. Must not raise.
        pings: every heartbeat. Otherwise the peer does, and this end only if it hears nothing.
    """

    def __init__(
        self,
        ws: WebSocket,
        *,
        decode: Callable[[str], Struct],
        handle: Callable[[Any], Awaitable[Struct]],
        notice: Callable[[Struct], None],
        peer: str,
        limits: Limits,
        unawaited: Callable[[Struct], None] = lambda answer: None,
        surplus: Callable[[Struct], None] = lambda request: None,
        pings: bool = True,
    ) -> None:
        self._ws = ws
        self._decode = decode
        self._handle = handle
        self._notice = notice
        self._unawaited = unawaited
        self._surplus = surplus
        self._peer = peer
        self._limits = limits
        # In the first silent heartbeat a ping of the peer may just be late.
        self._ping_from = 1 if pings else min(2, limits.missed_max)
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._pending: dict[int, asyncio.Future[m.Answer]] = {}
        self._handling = 0
        self._ids = 0
        self._missed = 0
        self._beats = RateLimit(limits.beats)
        self._requests = RateLimit(limits.requests)
        self._bytes = RateLimit(limits.bytes)
        self._received = 0

    @property
    def ended(self) -> Ended | None:
        """Why the session ended, None while it is open."""
        return self._ended.result() if self._ended.done() else None

    async def wait_ended(self) -> Ended:
        """Waits until the session has ended."""
        return await asyncio.shield(self._ended)

    def end(self, reason: str, detail: str = "") -> None:
        """Ends the session with a goodbye; `run` then returns. Idempotent."""
        self._end(Ended(reason, detail, by_peer=False))

    async def notify(self, message: Struct) -> None:
        """Sends a message that has no answer; a failure ends the session."""
        if not self._ended.done() and not await send(self._ws, message, self._limits.send_s):
            self._end(Ended(LOST, "a message could not be sent", by_peer=True))

    def next_id(self) -> int:
        """The `id` of the next request."""
        self._ids += 1
        return self._ids - 1

    async def request(self, request: m.Request[AnswerT], wait_s: float) -> AnswerT:
        """Sends a request and waits for its answer.

        Args:
            request: with an id from `next_id`.
            wait_s: how long to wait.

        Raises:
            RequestRefusedError: the peer refused.
            SessionLostError: the session ended before the answer came.
            DeadlineError: no answer in time; the session goes on.
        """
        self._raise_if_ended()
        future: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = future
        try:
            async with asyncio.timeout(wait_s):
                await self.notify(request)
                result = await future
        except TimeoutError:
            raise DeadlineError(
                f"no answer within {wait_s:g} s", where=self._peer, mend="It may be overloaded."
            ) from None
        finally:
            del self._pending[request.id]
            future.cancel()
        if isinstance(result, m.RefusedAnswer):
            raise RequestRefusedError(
                f"refused ({result.reason}){': ' if result.detail else ''}{result.detail}",
                where=self._peer,
                reason=result.reason,
            )
        answer = m.answer_type(type(request))
        if not isinstance(result, answer):
            detail = f"a {type(result).__name__} where a {answer.__name__} was due"
            self.end(m.GOODBYE_PROTOCOL, detail)
            raise ProtocolMismatchError(detail, where=self._peer)
        return result

    async def run(self, on_end: Callable[[Ended], None] | None = None) -> Ended:
        """Serves the session until it ends.

        Args:
            on_end: called at once when it has ended; `run` itself returns only after the requests
                of the peer that are being worked on.
        """
        if on_end is not None:
            self._ended.add_done_callback(lambda done: on_end(done.result()))
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(tasks), name=f"session reader {self._peer}")
            heart = tasks.create_task(self._beat(), name=f"session heartbeat {self._peer}")
            try:
                ended = await asyncio.shield(self._ended)
            finally:
                heart.cancel()
                if not self._ended.done():
                    self.end(m.GOODBYE_SHUTDOWN, "cancelled")
            if not ended.by_peer:
                goodbye = m.Goodbye(reason=ended.reason[:64], detail=ended.detail[:512])
                await send(self._ws, goodbye, self._limits.send_s)
            close_s = self._limits.send_s
            await close(self._ws, min(close_s, HURRIED_S) if ended.is_broken else close_s)
            reader.cancel()
        return ended

    def _raise_if_ended(self) -> None:
        if self._ended.done():
            raise self._lost(self._ended.result())

    def _lost(self, ended: Ended) -> SessionLostError:
        detail = f": {ended.detail}" if ended.detail else ""
        return SessionLostError(f"the session ended ({ended.reason}{detail})", where=self._peer)

    def _end(self, ended: Ended) -> None:
        if self._ended.done():
            return
        self._ended.set_result(ended)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._lost(ended))

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while not self._ended.done():
            try:
                frame = await receive(self._ws, beaten=self._beaten)
                message = None if frame is None else self._decode(frame)
                self._count(message)
            except FloodError as error:
                self.end(m.GOODBYE_FLOOD, error.what)
                return
            except ProtocolMismatchError as error:
                self.end(m.GOODBYE_PROTOCOL, error.what)
                return
            self._missed = 0
            if message is None:
                self._end(Ended(LOST, "the connection was closed", by_peer=True))
                return
            await self._take(message, tasks)

    def _count(self, message: Struct | None) -> None:
        """Raises FloodError. Expected answers are not counted: requests bound their number."""
        if isinstance(message, m.Ping | m.Pong | m.DrainNotice):
            self._beaten()
        elif isinstance(message, m.Request) or (
            isinstance(message, m.Answer) and message.id not in self._pending
        ):
            _bear(self._requests, "requests and unexpected answers")

    def _beaten(self) -> None:
        _bear(self._beats, "heartbeats and notices")

    async def _take(self, message: Struct, tasks: asyncio.TaskGroup) -> None:
        if isinstance(message, m.Ping):
            await self.notify(m.Pong(id=message.id))
        elif isinstance(message, m.Pong):
            pass
        elif isinstance(message, m.Goodbye):
            self._end(Ended(message.reason, message.detail, by_peer=True))
        elif isinstance(message, m.DrainNotice):
            self._notice(message)
        elif isinstance(message, m.Answer):
            future = self._pending.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
            else:  # it came after its deadline, twice, or unasked
                self._unawaited(message)
        elif isinstance(message, m.Request):
            if self._handling >= self._limits.handling_max:
                self._surplus(message)
                detail = f"{self._handling} requests of this session are under way"
                await self.notify(
                    m.RefusedAnswer(id=message.id, reason=m.REFUSED_BUSY, detail=detail)
                )
                return
            self._handling += 1
            name = f"{type(message).__name__} of {self._peer}"
            tasks.create_task(self._answer(message), name=name)
        else:
            self.end(m.GOODBYE_PROTOCOL, f"a {type(message).__name__} in an open session")

    async def _answer(self, request: Any) -> None:
        try:
            # A peer that does not read its answers gets no further ones.
            await self.notify(await self._answer_to(request))
        finally:
            self._handling -= 1

    async def _answer_to(self, request: Any) -> Struct:
        try:
            return await self._handle(request)
        except RequestRefusedError as error:
            return m.RefusedAnswer(id=request.id, reason=error.reason, detail=error.what[:512])
        except InfiniswapError as error:
            return m.RefusedAnswer(id=request.id, reason=m.REFUSED_ERROR, detail=str(error)[:512])
        except TimeoutError:
            return m.RefusedAnswer(
                id=request.id, reason=m.REFUSED_BUSY, detail="it was not done in time"
            )
        except Exception:
            # A fault here must not end other sessions.
            log.exception("%s from %s failed", type(request).__name__, self._peer)
            return m.RefusedAnswer(
                id=request.id, reason=m.REFUSED_ERROR, detail="internal error, see the log"
            )

    def _look(self) -> None:
        """Counts all bytes, by the kernel: the library reads some without making a message."""
        received = bytes_received(self._ws)
        more, self._received = max(0, received - self._received), received
        if not self._bytes.take(asyncio.get_running_loop().time(), more):
            mib = self._bytes.rate.per_s / m.MESSAGE_BYTES_MAX
            self.end(m.GOODBYE_FLOOD, f"more than {mib:g} MiB a second")

    async def _beat(self) -> None:
        beat = 0
        while True:
            await next_tick(self._limits.heartbeat_s)
            self._missed += 1
            if self._missed > self._limits.missed_max:
                silent_s = self._limits.missed_max * self._limits.heartbeat_s
                self._end(Ended(m.GOODBYE_SILENCE, f"silent for {silent_s:g} s", by_peer=False))
                return
            self._look()
            if self._missed >= self._ping_from:
                beat += 1
                await self.notify(m.Ping(id=beat))


def _bear(limit: RateLimit, what: str) -> None:
    if not limit.take(asyncio.get_running_loop().time()):
        raise FloodError(f"more than {limit.rate.per_s:g} {what} a second")
