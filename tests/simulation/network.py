# SPDX-License-Identifier: Apache-2.0
"""Connections between simulated hosts, as the control protocol sees them: WebSockets.

As over TCP, what is sent over one connection arrives in order and once, late, or not at all because
the connection is gone; what two connections carry comes in any order. Where the protocol says that
it bears a request told twice, requests are told twice.
"""

from __future__ import annotations

import errno
import re
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import WSMessage, WSMsgType

from infiniswap.control import messages as m
from simulation.loop import Host, SimFuture, SimLoop

_TYPE = re.compile(r'"type":"(\w+)"')
_TWICE = frozenset(("map", "unmap", "evict", "activity", "memory", "drain", "ping", "pong"))
_TWICE_LATE = frozenset(("unmap", "evict"))
"""They name a generation: the second time may come when the slot has been used again."""
_CLOSED = WSMessage(WSMsgType.CLOSED, None, None)
_CLOSING = WSMessage(WSMsgType.CLOSING, None, None)
_FAREWELL = "farewell"


FIGURES = "figures-of-"
"""Before a name: the address that it stands for."""


def certificate_of(name: str) -> bytes:
    """Each donor has its own."""
    return f"the certificate of {name}".encode()


def _end(wait: SimFuture | None) -> None:
    if wait is not None and not wait.done():
        wait.set_result(None)


class End:
    """One end of a connection: what Channel uses of aiohttp's two WebSocket classes."""

    protocol = m.SUBPROTOCOL

    def __init__(self, network: Network, host: Host) -> None:
        self.host = host
        self.peer: End = self
        self.is_open = True
        self._network = network
        self._inbox: deque[WSMessage] = deque()
        self._waiter: SimFuture | None = None
        self._farewell: SimFuture | None = None
        self._arrival_s = 0.0
        self.held: list[str] = []

    def get_extra_info(self, name: str) -> Any:
        """The other end's address in figures: a name of its own here. There is no socket."""
        if name == "socket":
            return None
        if name == "ssl_object":
            certificate = certificate_of(self.peer.host.name)
            return SimpleNamespace(getpeercert=lambda *, binary_form: certificate)
        assert name == "peername"
        return f"{FIGURES}{self.peer.host.name}", 0

    async def receive(self) -> WSMessage:
        while not self._inbox:
            if not self.is_open:
                return _CLOSED
            self._waiter = self._network.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._inbox.popleft()

    async def send_str(self, text: str) -> None:
        """Into the socket's buffer: nobody knows whether it will arrive."""
        if not self.is_open:
            raise ConnectionResetError("Cannot write to closing transport")
        self._network.send(self, text)

    async def close(self) -> None:
        """Says farewell and waits until the peer has."""
        if not self.is_open:
            return
        self._feed(_CLOSING)
        self._farewell = self._network.loop.create_future()
        self._network.send(self, _FAREWELL)
        self.is_open = False
        try:
            await self._farewell
        finally:
            if not self._farewell.done() or self._farewell.cancelled():
                self._network.reset(self)

    def arrive(self, text: str) -> None:
        if text != _FAREWELL:
            if self.is_open:
                self._feed(WSMessage(WSMsgType.TEXT, text, None))
            return
        if self.is_open:
            self._network.send(self, _FAREWELL)  # as aiohttp does by itself
        self.broken()

    def broken(self) -> None:
        self.is_open = False
        _end(self._farewell)
        self._feed(_CLOSED)

    def _feed(self, message: WSMessage) -> None:
        self._inbox.append(message)
        _end(self._waiter)


Serve = Callable[[End, str], Coroutine[Any, Any, None]]


class Network:
    """All connections.

    Args:
        loop: time.
        rng: delays.
    """

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self.loop = loop
        self.duplicate_share = 0.0
        self.delay_s_max = 0.002
        self.one_address = ""
        """That of all who connect, as devices of one host have it; empty: each has its own."""
        self._rng = rng
        self._listeners: dict[str, tuple[Host, Serve]] = {}
        self._ends: list[End] = []
        self._cut: set[tuple[str, str]] = set()
        self._silent: set[str] = set()

    # ---------------------------------------------------------------------- faults

    def partition(self, one: str, other: str) -> None:
        """Nothing arrives between two hosts until `heal`; connections stay."""
        self._cut |= {(one, other), (other, one)}

    def heal(self, one: str, other: str) -> None:
        """What was held back arrives."""
        self._cut -= {(one, other), (other, one)}
        for end in list(self._ends):
            if not self.is_cut(end.host, end.peer.host):
                held, end.held = end.held, []
                for text in held:
                    self._deliver_later(end, text)

    def is_cut(self, one: Host, other: Host) -> bool:
        return (one.name, other.name) in self._cut

    def cut_sessions(self, one: str, other: str) -> None:
        for end in list(self._ends):
            if (end.host.name, end.peer.host.name) == (one, other):
                self.reset(end)
                end.broken()

    def host_died(self, host: Host, silently: bool) -> None:
        """Every connection of a host is gone; the peers are told, or not.

        A silent death (no power) is told when something is sent to the host that is back:
        `host_back`.
        """
        if silently:
            self._silent.add(host.name)
        for end in [end for end in self._ends if end.host is host]:
            if silently:
                self._forget(end)
            else:
                self.reset(end)
            end.broken()

    def host_back(self, name: str) -> None:
        """Its kernel answers again."""
        self._silent.discard(name)

    def reset(self, end: End) -> None:
        """The peer of an end hears, some time, that the connection is gone."""
        self._forget(end)
        self.loop.world.run(
            self.loop.call_later, self._delay_s(), self._reset, end.peer, end.peer.host
        )

    def _reset(self, end: End, host: Host) -> None:
        if not host.dead and end.is_open:
            self._forget(end)
            end.broken()

    def _forget(self, end: End) -> None:
        self._ends = [known for known in self._ends if known is not end and known is not end.peer]

    # -------------------------------------------------------------------- messages

    def _delay_s(self) -> float:
        slow = self._rng.random() < 0.05
        return self._rng.random() * self.delay_s_max * (50 if slow else 1)

    def send(self, end: End, text: str) -> None:
        if end.host.dead:
            return
        if self.is_cut(end.host, end.peer.host):
            end.held.append(text)
            return
        self._deliver_later(end, text)
        kind = _TYPE.search(text)
        if kind and kind[1] in _TWICE and self._rng.random() < self.duplicate_share:
            if kind[1] in _TWICE_LATE:
                later_s = self._rng.choice((0.001, 0.1, 0.5, 2.0))
                self.loop.world.run(self.loop.call_later, later_s, self._deliver, end, text)
            else:
                self._deliver_later(end, text)

    def _deliver_later(self, end: End, text: str) -> None:
        end._arrival_s = max(end._arrival_s, self.loop.now_s + self._delay_s())
        self.loop.world.run(self.loop.call_at, end._arrival_s, self._deliver, end, text)

    def _deliver(self, end: End, text: str) -> None:
        if self.is_cut(end.host, end.peer.host):
            end.held.append(text)
            return
        kind = _TYPE.search(text)
        what = kind[1] if kind else text
        self.loop.note(f"{end.host.name} > {end.peer.host.name}: {what}")
        if end.peer.host.dead:
            if end.peer.host.name not in self._silent:
                self._reset(end, end.host)
        else:
            end.peer.arrive(text)

    # ----------------------------------------------------------------- connections

    def listen(self, address: str, host: Host, serve: Serve) -> None:
        self._listeners[address] = (host, serve)

    def silence(self, address: str) -> None:
        """Nobody listens there any more."""
        self._listeners.pop(address, None)

    def client(self, host: Host) -> Callable[[], Any]:
        return lambda: Http(self, host)

    async def open(self, host: Host, address: str) -> End:
        """Connects; waits for as long as nobody answers."""
        while True:
            await self._pause(self._delay_s())
            address = address.removeprefix(FIGURES)
            name, _, _ = address.partition(":")
            listener = self._listeners.get(address)
            is_heard = (host.name, name) not in self._cut and name not in self._silent
            if is_heard and listener is None:
                key = SimpleNamespace(host=name, port=0, ssl=False)
                error = OSError(errno.ECONNREFUSED, "Connection refused")
                raise aiohttp.ClientConnectorError(key, error)  # type: ignore[arg-type]
            if is_heard and listener is not None and not listener[0].frozen:
                return self._connect(host, *listener)
            await self._pause(0.2)  # the kernel sends its SYN again

    async def _pause(self, pause_s: float) -> None:
        """By the world's clock, whatever the host's shows."""
        over = self.loop.create_future()
        self.loop.world.run(self.loop.call_later, pause_s, _end, over)
        await over

    def _connect(self, host: Host, there: Host, serve: Serve) -> End:
        mine, theirs = End(self, host), End(self, there)
        mine.peer, theirs.peer = theirs, mine
        self._ends += [mine, theirs]
        there.spawn(serve(theirs, f"{self.one_address or host.name}:1"), "session")
        return mine

    def open_connections(self) -> int:
        """Ends that nobody has closed."""
        return sum(end.is_open for end in self._ends)


@dataclass
class Http:
    """What `connect` uses of aiohttp.ClientSession."""

    network: Network
    host: Host

    async def ws_connect(self, url: str, **_options: Any) -> End:
        return await self.network.open(self.host, url.split("/")[2])

    async def close(self) -> None: ...
