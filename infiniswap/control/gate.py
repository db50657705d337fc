# SPDX-License-Identifier: Apache-2.0
"""Limits TCP connections to the control port: in all, and of one peer.

Decided before a byte is read, so that thousands of connections cost little more than their accept.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from infiniswap.control.peer import peer_of

REFUSAL: Final = (
    b"HTTP/1.1 503 Too many connections\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
"""The answer to every connection above the limit."""


class Gate:
    """Counts connections; those within the limits get a protocol made by `make`.

    Args:
        make: makes the protocol of one connection; None: the server has stopped.
        connections_max: at once.
        per_host_max: at once of one peer (see peer_of).
        counters: gets `connections_refused`.
        refused: told the address of each that is refused.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol | None],
        connections_max: int,
        per_host_max: int,
        counters: Counter[str],
        refused: Callable[[str], None] = lambda host: None,
    ) -> None:
        self._make = make
        self._connections_max = connections_max
        self._per_host_max = per_host_max
        self._counters = counters
        self._refused = refused
        self._open = 0
        self._by_host: Counter[str] = Counter()

    def __call__(self) -> asyncio.Protocol:
        """For loop.create_server."""
        return _Counted(self)

    def enter(self, host: str) -> asyncio.Protocol | None:
        """The protocol of a new connection, which `leave` must follow; None: refused."""
        peer = peer_of(host)
        full = self._open >= self._connections_max or self._by_host[peer] >= self._per_host_max
        protocol = None if full else self._make()
        if protocol is None:
            self._counters["connections_refused"] += 1
            self._refused(host)
        else:
            self._open += 1
            self._by_host[peer] += 1
        if not self._by_host[peer]:
            del self._by_host[peer]
        return protocol

    def leave(self, host: str) -> None:
        """The connection is gone."""
        peer = peer_of(host)
        self._open -= 1
        self._by_host[peer] -= 1
        if not self._by_host[peer]:
            del self._by_host[peer]


class _Counted(asyncio.Protocol):
    """Passes everything on, and tells the gate when the connection has ended."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._host = ""
        self._inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self._host = peer[0] if peer else ""
        self._inner = self._gate.enter(self._host)
        if self._inner is None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(REFUSAL)
            transport.close()
        else:
            self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._inner is not None:
            self._gate.leave(self._host)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
