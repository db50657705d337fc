# SPDX-License-Identifier: Apache-2.0
"""The donor's end of the control API: HTTP and sessions on one port.

The server knows the protocol; what requests do is the business of a `Service` (the donor). Every
wait for a peer is bounded, and so is what a peer without a proof can make us hold: connections are
counted, and those that have not proved themselves give way to others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from infiniswap import __version__
from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.admission import Admission
from infiniswap.control.channel import (
    HURRIED_S,
    Channel,
    Ended,
    WebSocket,
    close,
    send,
)
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.handshake import Handshakes, PeerLog, known
from infiniswap.control.http import web
from infiniswap.control.openapi import document
from infiniswap.control.page_routes import add_page, new_link
from infiniswap.control.peer import Caller, unmapped
from infiniswap.control.port import HttpPort, PortLimits, error_answer, json_answer
from infiniswap.control.roles import Role
from infiniswap.control.scrape import READERS, UNAUTHORIZED, answer, may_scrape
from infiniswap.control.service import Page, ServerConfig, ServerSession, Service
from infiniswap.control.tls import ServerTls
from infiniswap.errors import RequestRefusedError
from infiniswap.keys import Keys
from infiniswap.units import HostPort

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Access:
    """Who may ask: whoever has that key or, with certificates, one of these roles."""

    key_of: Callable[[Keys], bytes | None]
    roles: frozenset[Role]


_READ: Final = _Access(lambda keys: keys.session, READERS)
_OPERATE: Final = _Access(lambda keys: keys.operator, frozenset({Role.OPERATOR}))


class ControlServer:
    """Serves one service on one port.

    Args:
        service: the donor.
        config: bounds.
    """

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self._service = service
        self._config = config
        self.counters: Counter[str] = Counter()
        self._nonces = auth.Nonces(secrets.token_bytes(auth.NONCE_BYTES))
        self._sessions: dict[int, ServerSession] = {}
        self._log_peer = PeerLog(self.counters)
        self._admission = Admission(config.tls)
        self._handshakes = Handshakes(config, self._admission, self.counters, self._log_peer)
        self._stopping = False
        limits = PortLimits(
            connections_max=config.connections_max,
            connections_per_host_max=config.connections_per_host_max,
            request_s=config.request_s,
            proof_s=config.proof_s,
            stop_s=config.stop_s,
            tls_per_host=config.tls_per_host,
            tls_of_strangers=config.tls_of_strangers,
        )
        self._port = HttpPort(
            limits,
            self.counters,
            self._kept_out,
            self._no_tls,
            config.tls,
            self._bad_certificate,
        )
        router = self._port.router
        router.add_get(m.SESSION_PATH, self._session)
        router.add_get(m.STATUS_PATH, self._status)
        router.add_post(m.DRAIN_PATH, self._drain)
        router.add_post(m.DRAIN_FORCE_PATH, self._drain)
        router.add_post(m.UNDRAIN_PATH, self._drain)
        router.add_get(m.VERSION_PATH, self._version)
        router.add_get(m.NONCE_PATH, self._nonce)
        router.add_get(m.OPENAPI_PATH, self._openapi)
        router.add_get(METRICS_PATH, self._metrics)

    def add_page(self, page: Page) -> None:
        """Serves a page to browsers as well. Before the start."""

        async def link(request: web.Request) -> web.StreamResponse:
            """Whoever may read the status may have a browser read it."""
            made = new_link(page, self._service, self._config.tls.digest)
            return await self._proven(request, _READ, made)

        add_page(self._port, page, self._admission, self.counters)
        self._port.router.add_post(m.PAGE_LINK_PATH, link)

    @property
    def sessions(self) -> tuple[ServerSession, ...]:
        """Those that are open."""
        return tuple(self._sessions.values())

    def use_tls(self, tls: ServerTls) -> None:
        """Shows another certificate of the same cluster from the next connection on, and goes by
        the authorities that are trusted now."""
        self._admission.tls = tls
        self._port.use_tls(tls)

    def end_given_up(self, now_s: float | None) -> None:
        """Ends sessions whose certificates no longer count; `now_s`: see Admission."""
        loop_s = asyncio.get_running_loop().time()
        self._admission.end_given_up(self.sessions, now_s, loop_s)

    # -------------------------------------------------------------- start and stop

    async def start(self, address: HostPort) -> int:
        """Listens and serves; returns the port (another than asked for only when that was 0).

        Raises:
            ConflictError: the port is in use.
            SystemCallError: the address cannot be listened on.
        """
        return await self._port.start(
            address,
            "Another daemon may be running; see `infiniswap status`, or give another port with "
            "--listen.",
        )

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Those that it listens on."""
        return self._port.sockets

    async def stop(self, reason: str = m.GOODBYE_SHUTDOWN, detail: str = "") -> None:
        """Says goodbye to every session and stops serving, in bounded time. Idempotent."""
        self._stopping = True
        for session in self.sessions:
            session.channel.end(reason, detail)
        # Waits for the handlers (bounded), so for every goodbye.
        await self._port.stop()

    # ------------------------------------------------------------------------ HTTP

    async def _proven(
        self,
        request: web.Request,
        access: _Access,
        answer_it: Callable[[], Awaitable[web.Response]],
        unauthorized: str = "the proof of the cluster secret is missing or wrong",
    ) -> web.StreamResponse:
        """Answers whoever has proved such a key, with the donor's own proof; with certificates,
        whoever has shown one with such a role."""
        if self._config.tls.cluster:
            return await self._certified(request, access.roles, answer_it)
        given = auth.parse_http_authorization(request.headers.get("Authorization", ""))
        now_s = asyncio.get_running_loop().time()
        if given is not None and self._nonces.is_good(given[0], now_s):
            asked = auth.HttpRequest(
                self._config.tls.digest, request.method, request.path, given[0]
            )
            for keys in self._config.keys.accepted():
                key = access.key_of(keys)
                if key is None or not auth.proofs_equal(given[1], auth.http_proof(key, asked)):
                    continue
                self._config.keys.used(keys, f"a command at {_peer_name(request)}")
                self._nonces.use(given[0])
                self._port.proved(request)
                found = await answer_it()
                found.headers[auth.PROOF_HEADER] = auth.http_donor_proof(key, asked)
                return found
        self.counters["http_unauthorized"] += 1
        return error_answer(401, unauthorized)

    async def _certified(
        self,
        request: web.Request,
        roles: frozenset[Role],
        answer_it: Callable[[], Awaitable[web.Response]],
    ) -> web.StreamResponse:
        try:
            self._admission.admit(request.transport, roles, time.time())
        except ValueError as error:
            self.counters["certificates_refused"] += 1
            self._bad_certificate(_peer_name(request), str(error))
            return error_answer(403, str(error))
        self._port.proved(request)
        return await answer_it()

    async def _status(self, request: web.Request) -> web.StreamResponse:
        async def status() -> web.Response:
            await self._service.refresh()
            return json_answer(self._service.status())

        return await self._proven(request, _READ, status)

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        """Three paths without a body: the proof covers the whole request."""
        draining = request.path != m.UNDRAIN_PATH
        force = request.path == m.DRAIN_FORCE_PATH

        async def drain() -> web.Response:
            wish = "drain --force" if force else "drain" if draining else "undrain"
            log.warning("%s asks for %s", _peer_name(request), wish)
            return json_answer(await self._service.set_draining(draining, force=force))

        return await self._proven(request, _OPERATE, drain)

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        async def openapi() -> web.Response:
            return json_answer(document(__version__))

        return await self._proven(request, _READ, openapi)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        async def metrics() -> web.Response:
            return await answer(self._service.figures)

        if may_scrape(request, self._config.metrics_token):
            self._port.proved(request)
            return await metrics()
        return await self._proven(request, _READ, metrics, UNAUTHORIZED)

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return json_answer(
            m.VersionInfo(product="infiniswap", software=__version__, versions=list(m.VERSIONS))
        )

    async def _nonce(self, _request: web.Request) -> web.StreamResponse:
        now_s = asyncio.get_running_loop().time()
        return json_answer(m.NonceInfo(nonce=self._nonces.make(secrets.token_bytes(8), now_s)))

    # -------------------------------------------------------------------- sessions

    async def _session(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(
            protocols=(m.SUBPROTOCOL,),
            max_msg_size=m.MESSAGE_BYTES_MAX,
            compress=False,
            autoping=False,
            timeout=self._config.limits.send_s,
        )
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        if m.SUBPROTOCOL not in [name.strip() for name in offered.split(",")]:
            return error_answer(400, f"not a WebSocket request for the protocol {m.SUBPROTOCOL!r}")
        await ws.prepare(request)
        due_s = self._port.proof_due_s(request)
        caller = Caller.at(_peer_name(request), self._port.peer_of(request))
        await self.converse(ws, caller, due_s, lambda: self._port.proved(request))
        return ws

    async def converse(
        self,
        ws: WebSocket,
        caller: Caller,
        due_s: float = float("inf"),
        proved: Callable[[], None] = lambda: None,
    ) -> None:
        """Handshake (see Handshakes.perform) and session over an open connection; returns when they
        have ended. `proved` is told when the peer has proved itself."""
        session = await self._handshakes.perform(
            ws, caller, len(self._sessions), due_s, is_stopping=self._stopping
        )
        if session is None:
            await close(ws, min(self._config.limits.send_s, HURRIED_S))
        else:
            proved()
            await self._serve(ws, session)

    async def _serve(self, ws: WebSocket, session: ServerSession) -> None:
        async def handle(request: Any) -> msgspec.Struct:
            try:
                return await self._service.handle(session, request)
            except RequestRefusedError as error:
                self._refused(session, request, error)
                raise

        def unawaited(answer: msgspec.Struct) -> None:
            self.counters["answers_unawaited"] += 1
            kind = type(answer).__name__
            self._log_peer("%s: an unexpected %s: late, or replayed", session, kind)

        def surplus(request: msgspec.Struct) -> None:
            self.counters[f"requests_refused_{m.REFUSED_BUSY}"] += 1
            kind, most = type(request).__name__, self._config.limits.handling_max
            self._log_peer("refused a %s of %s: %d are under way", kind, session, most)

        channel = Channel(
            ws,
            decode=m.decode_to_donor,
            handle=handle,
            notice=lambda message: None,
            peer=str(session),
            limits=self._config.limits,
            unawaited=unawaited,
            surplus=surplus,
            pings=False,
        )
        session.attach(channel)

        def closed(ended: Ended) -> None:
            self._sessions.pop(session.number, None)
            self.counters[f"sessions_ended_{known(ended.reason)}"] += 1
            if ended.reason == m.GOODBYE_PROTOCOL and not ended.by_peer:
                self.counters["protocol_errors"] += 1
            if ended.reason == m.GOODBYE_FLOOD and not ended.by_peer:
                self._handshakes.keep_out(session.peer)
            self._service.session_closed(session, ended)

        self._sessions[session.number] = session
        self.counters["sessions_opened"] += 1
        self._service.session_opened(session)
        welcome = self._service.welcome(session.version, session.proof)
        if not await send(ws, welcome, self._config.limits.send_s):
            channel.end(m.GOODBYE_ERROR, "the welcome could not be sent")
        if self._stopping:
            channel.end(m.GOODBYE_SHUTDOWN)
        await channel.run(closed)

    def _refused(self, session: ServerSession, request: Any, error: RequestRefusedError) -> None:
        """Counts it, and logs requests that no consumer makes that knows its leases and limits."""
        self.counters[f"requests_refused_{error.reason}"[:80]] += 1
        if error.reason in (m.REFUSED_UNKNOWN_LEASE, m.REFUSED_STALE, m.REFUSED_QUOTA):
            self._log_peer("refused a %s of %s: %s", type(request).__name__, session, error.what)

    def _no_tls(self, host: str) -> None:
        self._log_peer(
            "refused a connection from %s that does not begin TLS: if it is an Infiniswap, its "
            "protocol version is 1, and it has to be upgraded",
            host,
        )

    def _bad_certificate(self, host: str, why: str) -> None:
        self._log_peer("refused a connection from %s: %s", host, why)

    def _kept_out(self, host: str) -> None:
        self._log_peer(
            "refused a connection from %s: too many are open, or too many began lately", host
        )


def _peer_name(request: web.Request) -> str:
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return str(HostPort(unmapped(peer[0]), peer[1])) if peer else "unknown"
