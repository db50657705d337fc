# SPDX-License-Identifier: Apache-2.0
"""Limits connections to a port, in all and of one peer, and begins TLS on those let in, as often as
`handshake_rate` allows.

Connections are counted before a byte is read, so that thousands of connections cost little more
than their accept. One that does not prove itself in time ends, and earlier if others need its place
(infiniswap.control.places). The first byte says whether a peer begins TLS: one that does not is
told so. A peer that does not read what it asked for loses its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from typing import Final

from infiniswap.control import tls
from infiniswap.control.handshake_rate import HandshakeRates
from infiniswap.control.mutual import MutualContext
from infiniswap.control.peer import peer_of, unmapped
from infiniswap.control.places import PROOF_S, ConnectionPlaces
from infiniswap.control.socket_owner import peer_of_socket, trusted_users
from infiniswap.control.tls import ServerTls

REFUSAL: Final = (
    b"HTTP/1.1 503 Too many connections\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
"""The answer to every connection above the limit, on a port without TLS."""

PLAIN_SENTENCE: Final = "this port speaks TLS 1.3: use https://, or an Infiniswap of protocol 2"
_PLAIN_BODY: Final = b'{"error":"%s"}' % PLAIN_SENTENCE.encode()
PLAIN_REFUSAL: Final = (
    b"HTTP/1.1 400 This port speaks TLS\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_PLAIN_BODY), _PLAIN_BODY)
)
"""The answer to whoever does not begin TLS: most likely an Infiniswap of protocol version 1."""

_READ_BYTES: Final = 16 * 1024
_SHUTDOWN_S: Final = 1.0
"""How long a peer may take to agree to the end of TLS, or to read that it was refused."""
_REFUSED_OPEN_MAX: Final = 16
_GOODBYE_PART: Final = 0.1
"""Fraction of `proof_s` for which a late peer's connection stays open, so that it reads why it is
refused."""


class Gate:
    """Counts connections; those within the limits get a protocol made by `make`.

    Args:
        make: makes the protocol of one connection; None: the server has stopped.
        connections_max, per_host_max: see infiniswap.control.places.
        counters: gets `connections_refused`, `connections_displaced`, `connections_idle_closed`,
            `connections_unread_closed`, `connections_plain`, `handshakes_limited` and
            `certificates_refused`.
        refused: told the address of each that is refused, or has lost its place.
        plain: told the address of each that does not begin TLS.
        tls: key and certificate; None: connections stay plain.
        request_s: how long a peer may take to read what was sent to it.
        proof_s: how long it may take from its connection on until it has proved itself (`proved`).
        rates: how often peers may begin TLS; None: as often as they like.
        refused_certificate: told the address of each whose certificate does not count, and why.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol | None],
        connections_max: int,
        per_host_max: int,
        counters: Counter[str],
        refused: Callable[[str], None] = lambda host: None,
        plain: Callable[[str], None] = lambda host: None,
        tls: ServerTls | None = None,
        request_s: float = 5.0,
        proof_s: float = PROOF_S,
        rates: HandshakeRates | None = None,
        refused_certificate: Callable[[str, str], None] = lambda host, why: None,
    ) -> None:
        self.counters = counters
        self.plain = plain
        self.speaking = ""
        """The address of the peer whose handshake goes on in this moment."""
        self._refused_certificate = refused_certificate
        self.use_tls(tls)
        self.request_s = request_s
        self._make = make
        self.places = ConnectionPlaces[_Counted](connections_max, per_host_max, trusted_users())
        self._refused = refused
        self._rates = rates
        self.proof_s = proof_s
        self._let_in: dict[asyncio.Protocol, _Counted] = {}
        self._proof_due: dict[asyncio.Protocol, asyncio.TimerHandle] = {}
        self.refused_open = 0
        """Connections that were refused, and whose peers may still be reading why."""

    def use_tls(self, tls: ServerTls | None) -> None:
        """Shows this from the next connection on."""
        self.tls = tls
        if tls is not None and isinstance(tls.context, MutualContext):
            tls.context.refused = self._certificate_refused

    def _certificate_refused(self, why: str) -> None:
        self.counters["certificates_refused"] += 1
        self._refused_certificate(self.speaking, why)

    def __call__(self) -> asyncio.BaseProtocol:
        """Makes the protocol of a new connection, as loop.create_server asks."""
        return _Counted(self)

    def enter(self, peer: str, connection: _Counted) -> asyncio.Protocol | None:
        """The protocol of a new connection, which `leave` must follow; None: refused.

        Args:
            peer: whom it counts for (infiniswap.control.socket_owner).
            connection: tells its address, if it is refused.
        """
        now_s = asyncio.get_running_loop().time()
        is_in, lost = self.places.enter(peer, connection, now_s)
        for loser in lost:
            self.counters["connections_displaced"] += 1
            self._refused(loser.host)
            loser.end()
        protocol = self._make() if is_in else None
        if protocol is None:
            self.places.leave(connection)
            self.counters["connections_refused"] += 1
            self._refused(connection.host)
        return protocol

    def may_begin_tls(self, peer: str, host: str) -> bool:
        """Whether a connection that was let in may begin its handshake now."""
        if self._rates is None:
            return True
        now_s = asyncio.get_running_loop().time()
        is_stranger = not self.places.is_known(peer, now_s)
        if self._rates.take(peer, now_s, is_stranger=is_stranger):
            return True
        self.counters["handshakes_limited"] += 1
        self._refused(host)
        return False

    def wait(self, inner: asyncio.Protocol, connection: _Counted) -> None:
        """The connection with that protocol has begun; it ends when its time is up."""

        def end_idle() -> None:
            self.counters["connections_idle_closed"] += 1
            connection.end()

        self._let_in[inner] = connection
        loop = asyncio.get_running_loop()
        self._proof_due[inner] = loop.call_later(self.proof_s * (1 + _GOODBYE_PART), end_idle)

    def proved(self, inner: asyncio.Protocol) -> None:
        """The peer of the connection with that protocol has proved itself: it keeps its place."""
        timer = self._proof_due.pop(inner, None)
        if timer is not None:
            timer.cancel()
            self.places.proved(self._let_in[inner], asyncio.get_running_loop().time())

    def peer_of(self, inner: asyncio.Protocol) -> str | None:
        """Whom the connection with that protocol counts for; None: it is gone."""
        connection = self._let_in.get(inner)
        return None if connection is None else connection.peer

    def proof_due_s(self, inner: asyncio.Protocol) -> float:
        """Until when its peer has to prove itself, by the loop's clock."""
        timer = self._proof_due.get(inner)
        if timer is None:
            return asyncio.get_running_loop().time() + self.proof_s
        return timer.when() - _GOODBYE_PART * self.proof_s

    def leave(self, inner: asyncio.Protocol, connection: _Counted) -> None:
        """The connection is gone."""
        self._let_in.pop(inner, None)
        timer = self._proof_due.pop(inner, None)
        if timer is not None:
            timer.cancel()
        self.places.leave(connection)


class _Counted(asyncio.BufferedProtocol):
    """Passes everything on, and tells the gate when the connection has ended.

    With TLS what is read goes to asyncio's own TLS protocol, and that is made when the first record
    is there. (`loop.start_tls` could not be given what was read before.)
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.peer = ""
        """Whom it counts for."""
        self.host = ""
        """Where it comes from, in messages."""
        self._inner: asyncio.Protocol | None = None  # None: not let in
        self._plain: asyncio.Protocol | None = None  # what talks to a peer without TLS
        self._tls: sslproto.SSLProtocol | None = None
        self._waits_for_tls = False
        self._hello = bytearray()  # what was read while that waits
        self._transport: asyncio.Transport | None = None
        self._buffer: bytearray | None = None  # for what is read of no TLS
        self._unread: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None  # of one that was refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # So pause_writing is called as soon as the kernel has no room for more.
        transport.set_write_buffer_limits(0)
        self._name_peer(transport)
        inner = self._gate.enter(self.peer, self)
        if inner is None:
            self._refuse(transport)
            return
        self._inner = inner
        self._gate.wait(inner, self)
        if self._gate.tls is None:
            self._plain = inner
            inner.connection_made(transport)
        else:
            self._waits_for_tls = True

    def _name_peer(self, transport: asyncio.Transport) -> None:
        name = transport.get_extra_info("peername")
        self.peer = peer_of_socket(transport.get_extra_info("socket"), name)
        address = unmapped(name[0]) if name else ""
        self.host = address if peer_of(address) == self.peer else f"{address} ({self.peer})"

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Says why. If what the peer says was not read, the kernel would send it a reset, and the
        peer would not see the answer; but only few of those refused may keep a connection open."""
        transport.write(REFUSAL if self._gate.tls is None else tls.FULL)
        if self._gate.refused_open >= _REFUSED_OPEN_MAX:
            transport.close()
            return
        self._gate.refused_open += 1
        self._lingering = asyncio.get_running_loop().call_later(_SHUTDOWN_S, transport.abort)
        with contextlib.suppress(OSError):  # the peer has closed it already
            transport.write_eof()

    def end(self) -> None:
        """Ends the connection at once."""
        assert self._transport is not None
        self._transport.abort()

    def _end_unread(self) -> None:
        self._gate.counters["connections_unread_closed"] += 1
        self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_read()
        if self._lingering is not None:
            self._lingering.cancel()
            self._gate.refused_open -= 1
        if self._inner is not None:
            self._gate.leave(self._inner, self)
        inner = self._plain or self._tls
        if inner is not None:
            inner.connection_lost(error)

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        """Small, because a protocol that does not want more now gets all of it nevertheless."""
        if self._tls is not None:
            return memoryview(self._tls.get_buffer(sizehint))
        if self._buffer is None:
            self._buffer = bytearray(_READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._tls is not None:
            self._gate.speaking = self.host
            self._tls.buffer_updated(nbytes)
            return
        assert self._buffer is not None
        data = bytes(memoryview(self._buffer)[:nbytes])
        if self._plain is not None:
            self._plain.data_received(data)
        elif self._waits_for_tls:
            self._buffer = None
            self._hello += data
            self._begin_tls(bytes(self._hello))

    def _begin_tls(self, data: bytes) -> None:
        assert self._inner is not None
        assert self._transport is not None
        assert self._gate.tls is not None
        if data[0] == tls.FIRST_BYTE and not tls.is_record(data):
            return  # costs nothing yet, and nothing of what its peer may begin
        self._waits_for_tls = False
        self._hello.clear()
        if data[0] != tls.FIRST_BYTE:
            self._gate.counters["connections_plain"] += 1
            self._gate.plain(self.host)
            self._transport.write(PLAIN_REFUSAL)
            self._transport.close()
            return
        if not self._gate.may_begin_tls(self.peer, self.host):
            self._transport.write(tls.FULL)
            self._transport.close()
            return
        self._tls = sslproto.SSLProtocol(
            asyncio.get_running_loop(),
            self._inner,
            self._gate.tls.context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake: it may be None
            server_side=True,
            ssl_handshake_timeout=self._gate.request_s,  # type: ignore[arg-type]  # any number
            ssl_shutdown_timeout=_SHUTDOWN_S,
        )
        self._gate.speaking = self.host
        self._tls.connection_made(self._transport)
        self._feed(self._tls, data)

    def _feed(self, protocol: sslproto.SSLProtocol, data: bytes) -> None:
        """As a transport does for a protocol with buffers of its own."""
        rest = memoryview(data)
        while rest:
            buffer = memoryview(protocol.get_buffer(len(rest)))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            rest = rest[size:]
            protocol.buffer_updated(size)

    def eof_received(self) -> bool | None:
        inner = self._plain or self._tls
        return inner.eof_received() if inner is not None else None

    def pause_writing(self) -> None:
        loop = asyncio.get_running_loop()
        self._unread = loop.call_later(self._gate.request_s, self._end_unread)
        inner = self._plain or self._tls
        if inner is not None:
            inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_read()
        inner = self._plain or self._tls
        if inner is not None:
            inner.resume_writing()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
