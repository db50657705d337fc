# SPDX-License-Identifier: Apache-2.0
"""HTTP on one TCP port, with a bound on everything that a peer can make us hold or wait for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infiniswap.control import messages as m
from infiniswap.control.gate import Gate
from infiniswap.control.handshake_rate import OF_STRANGERS, PER_HOST, HandshakeRates
from infiniswap.control.http import HttpProcessingError, web
from infiniswap.control.listening import not_resolved, open_sockets
from infiniswap.control.places import PROOF_S
from infiniswap.control.rate import Rate
from infiniswap.control.tls import ServerTls
from infiniswap.errors import ConflictError, SystemCallError, from_oserror
from infiniswap.units import HostPort

log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 4096
_CONTINUE = "100-continue"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Bounds of a port.

    Attributes:
        connections_max: TCP connections at once.
        connections_per_host_max: see infiniswap.control.places.
        request_s: how long a peer may take to read an answer; three times that for another request.
        proof_s: how long it may take to prove itself, the handshake of TLS included.
        stop_s: how long stopping waits for requests under way.
        tls_per_host: TLS handshakes of one peer.
        tls_of_strangers: of all peers together that have not proved themselves lately.
    """

    connections_max: int
    connections_per_host_max: int
    request_s: float = 5.0
    proof_s: float = PROOF_S
    stop_s: float = 5.0
    tls_per_host: Rate = PER_HOST
    tls_of_strangers: Rate = OF_STRANGERS


class _HttpLog(logging.Handler):
    """Counts aiohttp's complaints (requests that are not HTTP) instead of logging them."""

    def __init__(self, counters: Counter[str]) -> None:
        super().__init__(logging.DEBUG)
        self._counters = counters

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and record.exc_info and record.exc_info[1]:
            error = record.exc_info[1]
            if not isinstance(error, web.HTTPException | HttpProcessingError | ConnectionError):
                log.error("a request failed: %r", error)
        self._counters["http_errors"] += 1


class HttpPort:
    """One port; routes are added to `router` before it is started. Whoever serves them says who has
    `proved` itself; without TLS any request does.

    Args:
        limits: bounds.
        counters: gets `connections_refused`, `connections_displaced`, `connections_idle_closed`,
            `connections_unread_closed`, `connections_plain`, `handshakes_limited`,
            `certificates_refused` and `http_errors`.
        refused: told the address of each connection that is refused or has lost its place.
        plain: told the address of each that does not begin TLS.
        tls: key and certificate; None: plain HTTP.
        certificate: told the address of each whose certificate is refused, and why.
    """

    def __init__(
        self,
        limits: PortLimits,
        counters: Counter[str],
        refused: Callable[[str], None] = lambda host: None,
        plain: Callable[[str], None] = lambda host: None,
        tls: ServerTls | None = None,
        certificate: Callable[[str, str], None] = lambda host, why: None,
    ) -> None:
        self._limits = limits
        self._counters = counters
        self.page_paths: tuple[str, ...] = ()
        """Below these a browser's pages may ask (Origin); who serves them looks at that."""
        self._app = web.Application(middlewares=[self._guard], client_max_size=_BODY_BYTES_MAX)
        self._gate = Gate(
            self._protocol,
            limits.connections_max,
            limits.connections_per_host_max,
            counters,
            refused,
            plain,
            tls,
            limits.request_s,
            limits.proof_s,
            HandshakeRates(limits.tls_per_host, limits.tls_of_strangers),
            certificate,
        )
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self.sockets: tuple[socket.socket, ...] = ()
        """Those that it listens on over TCP; infiniswap.control.listening.bound_to names them."""

    @property
    def router(self) -> web.UrlDispatcher:
        """The routes."""
        return self._app.router

    def use_tls(self, tls: ServerTls) -> None:
        """Shows another certificate from the next connection on."""
        self._gate.use_tls(tls)

    def proved(self, request: web.Request) -> None:
        """Whoever asks has proved itself, so that its connection may last."""
        self._gate.proved(request.protocol)

    def peer_of(self, request: web.Request) -> str:
        """Whom its connection counts for; empty: it is gone."""
        return self._gate.peer_of(request.protocol) or ""

    def proof_due_s(self, request: web.Request) -> float:
        """Until when whoever asks has to prove itself, by the loop's clock."""
        return self._gate.proof_due_s(request.protocol)

    async def start(self, address: HostPort, mend: str) -> int:
        """Listens and serves; returns the port (another than asked for only when that was 0).

        Args:
            address: where.
            mend: what to do when the port is in use.

        Raises:
            ConflictError: the port is in use.
            ConfigError: its name cannot be resolved.
            SystemCallError: the address cannot be listened on.
        """
        self._servers = await self._start(lambda: self._listen(address, mend))
        return int(self.sockets[0].getsockname()[1])

    async def start_local(self, path: Path) -> None:
        """Listens and serves on a Unix socket that every user of this host may connect to. One that
        a killed predecessor has left is replaced.

        Raises:
            NotPermittedError, SystemCallError: it cannot be made.
        """

        async def listen() -> list[asyncio.Server]:
            loop = asyncio.get_running_loop()
            return [await loop.create_unix_server(self._gate, sock=_bound(path))]

        try:
            self._servers = await self._start(listen)
        except OSError as error:
            raise from_oserror("cannot make the socket", error, where=str(path)) from error

    async def _start(
        self, listen: Callable[[], Awaitable[list[asyncio.Server]]]
    ) -> list[asyncio.Server]:
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            handle_signals=False,
            logger=self._http_logger(),
            keepalive_timeout=3 * self._limits.request_s,
            lingering_time=self._limits.request_s,
            shutdown_timeout=self._limits.stop_s,
        )
        await self._runner.setup()
        _refuse_expectations(self._runner)
        try:
            return await listen()
        except BaseException:
            await self._runner.cleanup()
            raise

    async def stop(self) -> None:
        """Ends in bounded time, with the requests that are under way. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers, self.sockets = [], ()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _http_logger(self) -> logging.Logger:
        logger = logging.Logger("infiniswap.control.http")  # private: not in the global tree
        logger.addHandler(_HttpLog(self._counters))
        return logger

    async def _listen(self, address: HostPort, mend: str) -> list[asyncio.Server]:
        loop = asyncio.get_running_loop()
        try:
            self.sockets = tuple(await asyncio.to_thread(open_sockets, address))
            return [await loop.create_server(self._gate, sock=sock) for sock in self.sockets]
        except (socket.gaierror, UnicodeError) as error:
            raise not_resolved(f"listen {address}", error) from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConflictError(
                    "the port is in use", where=f"listen {address}", mend=mend
                ) from error
            raise SystemCallError(
                f"cannot listen: {error.strerror}",
                where=f"listen {address}",
                mend="Give an address of this host and a port that this user may use.",
                code=error.errno or 0,
            ) from error

    def _protocol(self) -> asyncio.Protocol | None:
        server = None if self._runner is None else self._runner.server
        return None if server is None else server()

    def _is_of_page(self, request: web.Request) -> bool:
        """By the route: a path may be written in many ways."""
        resource = request.match_info.route.resource
        return resource is not None and resource.canonical.startswith(self.page_paths)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Middleware: keeps web pages out."""
        if self._gate.tls is None:
            self.proved(request)
        if "Origin" in request.headers and not self._is_of_page(request):
            # A page in a browser on this host could otherwise use the loopback port.
            return error_answer(403, "browsers are not served")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return error_answer(error.status, error.reason)


def _bound(path: Path) -> socket.socket:
    """A Unix socket there, for everybody."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_socket():
            path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(0o666)
    except BaseException:
        bound.close()
        raise
    return bound


def _refuse_expectations(runner: web.AppRunner) -> None:
    """aiohttp does so itself, and fails (500) when it quotes an Expect header that is no UTF-8."""
    server = runner.server
    assert server is not None
    serve = server.request_handler

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
            return error_answer(417, f"the only expectation is {_CONTINUE}")
        return await serve(request)

    server.request_handler = handle


def json_answer(body: Any) -> web.Response:
    """An answer of JSON."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def error_answer(status: int, text: str) -> web.Response:
    """An answer that is no success."""
    response = json_answer(m.HttpError(error=text))
    response.set_status(status)
    return response
