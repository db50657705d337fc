# SPDX-License-Identifier: Apache-2.0
"""Answers browsers: the files of the page for whoever asks, figures for those who may read them.

Over the WebSocket the browser speaks once, and is told what is wrong as a sentence:

    browser                            daemon
    {"link": "..."}                ->                     a link, good once
    {"session": "..."}             ->                     what a link was exchanged for
    {}                             ->                     nothing: a certificate, or this host
                                   <-  {"kind": "in", "session": "..."}
                                   <-  {"kind": "past", ...}, then {"kind": "look", ...} for ever
                                   <-  {"kind": "out", "why": "...", "sign_in": true}, then closed
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

import msgspec

from infiniswap.control.http import aiohttp, web
from infiniswap.control.peer import THIS_HOST, consumer_of
from infiniswap.control.port import error_answer
from infiniswap.control.service import Admitted
from infiniswap.ui.assets import INDEX, Asset
from infiniswap.ui.browsers import HEADERS, host_problem, origin_problem
from infiniswap.ui.links import LINK_S, TOKEN_LENGTH, Links
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.ui.cluster_watch import ClusterWatch

VIEWERS_MAX: Final = 16
"""At once, of those that have signed in. The port bounds the others."""
_SAID_BYTES_MAX: Final = 512
_SIGN_IN_S: Final = 5.0
_SEND_S: Final = 5.0
_PING_S: Final = 20.0

SIGN_IN: Final = (
    "Whoever may read this cluster's status may open this page. Run `infiniswap ui` on this "
    "daemon's host, or on another host of the cluster with this daemon's address or name, and open "
    "the link that it prints."
)
_LINK_IS_USED: Final = "This link is not good: it was used before, is older than five minutes, or "
_FULL: Final = (
    f"{VIEWERS_MAX} pages of this daemon are open, and it serves no more. Close one, or open the "
    "page of another daemon."
)


class _Said(msgspec.Struct, frozen=True):
    """What a browser says."""

    link: str = ""
    session: str = ""


class ClusterPage:
    """The page of one daemon.

    Args:
        assets: the files.
        watcher: asks the cluster.
        counters: gets `pages_refused`.
        is_open_here: whether every user of this host may read the daemon's status anyway.
        names: of this host.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        assets: dict[str, Asset],
        watcher: ClusterWatch,
        counters: Counter[str],
        *,
        is_open_here: bool,
        names: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._assets = assets
        self._watcher = watcher
        self._counters = counters
        self._is_open_here = is_open_here
        self._names = {name.lower() for name in names}
        self._links = Links(clock, secrets.token_bytes)
        self._viewers: set[web.WebSocketResponse] = set()

    def make_link(self) -> tuple[str, int]:
        """A link for one browser, and for how many seconds it is good."""
        return self._links.make(), LINK_S

    async def stop(self) -> None:
        """Ends every viewer's connection, and the watch. Idempotent."""
        for ws in list(self._viewers):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(ws.close(code=1001), _SEND_S)
        await self._watcher.stop()

    # ------------------------------------------------------------------------ files

    async def file(self, request: web.Request) -> web.StreamResponse:
        """One of the files; the page itself where no name is given."""
        if refused := self._refused(request, is_needed=False):
            return refused
        name = request.match_info.get("name") or INDEX
        asset = self._assets.get(name)
        if asset is None:
            return _with_headers(error_answer(404, "the page has no such file"))
        headers = {**HEADERS, "ETag": asset.tag}
        if request.headers.get("If-None-Match") == asset.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=asset.body, content_type=asset.kind, charset="utf-8", headers=headers
        )

    async def moved(self, request: web.Request) -> web.StreamResponse:
        """/ui: names in the page are relative to /ui/."""
        if refused := self._refused(request, is_needed=False):
            return refused
        return web.Response(status=308, headers={**HEADERS, "Location": "/ui/"})

    def _refused(self, request: web.Request, *, is_needed: bool) -> web.Response | None:
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        why = host_problem(host, self._names) or origin_problem(origin, host, is_needed=is_needed)
        if not why:
            return None
        self._counters["pages_refused"] += 1
        return _with_headers(error_answer(403, why))

    # ------------------------------------------------------------------------- live

    async def live(
        self, request: web.Request, admitted: Admitted, signed_in: Callable[[], None]
    ) -> web.StreamResponse:
        """The WebSocket: signs the browser in, then sends what is seen until it goes."""
        if refused := self._refused(request, is_needed=True):
            return refused
        ws = web.WebSocketResponse(
            max_msg_size=_SAID_BYTES_MAX, compress=False, heartbeat=_PING_S, timeout=1.0
        )
        if not ws.can_prepare(request).ok:
            return _with_headers(error_answer(400, "not a WebSocket request"))
        await ws.prepare(request)
        try:
            await self._serve(ws, request, admitted, signed_in)
        finally:
            self._viewers.discard(ws)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(ws.close(), _SEND_S)
        return ws

    async def _serve(
        self,
        ws: web.WebSocketResponse,
        request: web.Request,
        admitted: Admitted,
        signed_in: Callable[[], None],
    ) -> None:
        said = await _first(ws)
        if said is None:
            return
        session, why = self._sign_in(said, request, admitted)
        if why:
            self._counters["pages_refused"] += 1
            await _turn_out(ws, why, sign_in=True)
            return
        if len(self._viewers) >= VIEWERS_MAX:
            await _turn_out(ws, _FULL, sign_in=False)
            return
        self._viewers.add(ws)
        signed_in()
        gone = asyncio.create_task(_wait_gone(ws), name="viewer's end")
        sending = asyncio.create_task(self._send(ws, session), name="viewer")
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    def _sign_in(self, said: _Said, request: web.Request, admitted: Admitted) -> tuple[str, str]:
        """The session, empty where none is needed; and why the browser may not read."""
        if admitted.is_proved:
            return "", ""
        if admitted.why:
            return "", f"{admitted.why}. Give the browser a certificate with the role operator."
        if said.session and self._links.resume(said.session):
            return said.session, ""
        if said.link and (session := self._links.begin(said.link)):
            return session, ""
        if self._is_open_here and _is_loopback(request):
            return "", ""
        if said.link:
            return "", f"{_LINK_IS_USED}the daemon was started again since. {SIGN_IN}"
        return "", SIGN_IN

    async def _send(self, ws: web.WebSocketResponse, session: str) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, aiohttp.ClientError):
            await _say(ws, {"kind": "in", "session": session})
            async with self._watcher.viewer() as messages:
                async for message in messages:
                    await asyncio.wait_for(ws.send_str(message.decode()), _SEND_S)


async def _first(ws: web.WebSocketResponse) -> _Said | None:
    """What the browser says first; None: nothing of ours."""
    with contextlib.suppress(msgspec.DecodeError, TimeoutError):
        message = await asyncio.wait_for(ws.receive(), _SIGN_IN_S)
        if message.type is aiohttp.WSMsgType.TEXT:
            said = msgspec.json.decode(message.data, type=_Said)
            if max(len(said.link), len(said.session)) <= TOKEN_LENGTH:
                return said
    return None


async def _wait_gone(ws: web.WebSocketResponse) -> None:
    """Returns when the browser has gone, or says anything more: the page never does."""
    await ws.receive()


async def _turn_out(ws: web.WebSocketResponse, why: str, *, sign_in: bool) -> None:
    with contextlib.suppress(ConnectionError, TimeoutError, aiohttp.ClientError):
        await _say(ws, {"kind": "out", "why": why, "sign_in": sign_in})
        await asyncio.wait_for(ws.close(), _SEND_S)


async def _say(ws: web.WebSocketResponse, message: dict[str, object]) -> None:
    await asyncio.wait_for(ws.send_str(msgspec.json.encode(message).decode()), _SEND_S)


def _is_loopback(request: web.Request) -> bool:
    name = request.transport.get_extra_info("peername") if request.transport else None
    return bool(name and consumer_of(str(HostPort(name[0], name[1]))) == THIS_HOST)


def _with_headers(response: web.Response) -> web.Response:
    response.headers.update(HEADERS)
    return response
