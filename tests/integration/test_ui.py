# SPDX-License-Identifier: Apache-2.0
"""The page of a daemon, as browsers ask for it: who is let in, and what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.donors.browser import browser, get, heard, live
from support.donors.certificates import BOTH, Authority, client_with
from support.donors.certified_world import donor as certified_donor
from support.donors.donor_world import (
    WAIT_S,
    Handler,
    World,
    client_config,
    until,
    world,
)

from infiniswap.control import messages as m
from infiniswap.control.client import fetch_status, make_page_link
from infiniswap.control.roles import Role
from infiniswap.errors import ProtocolMismatchError, WrongSecretError
from infiniswap.ui import page
from infiniswap.ui.cluster_watch import ClusterWatch
from infiniswap.ui.page import VIEWERS_MAX

pytestmark = pytest.mark.timeout(15)
FIGURES = m.DeviceFigures(uptime_s=5.0, size_bytes=4 << 20, slabs=4, page_in_us_p50=40.0)


async def link_to(w: World) -> str:
    return (await make_page_link(w.address, client_config())).link


async def why_not(w: World, **said: str) -> str:
    """What a browser is told that is not let in."""
    async with browser() as http, live(http, w.address, **said) as ws:
        out = await heard(ws, "out")
        assert out["sign_in"]
        assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE
        why: str = out["why"]
        return why


# -------------------------------------------------------------------------------- files


async def test_the_files_are_served_to_whoever_asks_with_the_headers_of_a_closed_page() -> None:
    async with world() as w, browser() as http:
        answer = await get(http, w.address, "/ui/")
        assert answer.status == 200
        assert answer.content_type == "text/html"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        moved = await get(http, w.address, "/ui")
        assert (moved.status, moved.headers["Location"]) == (308, "/ui/")
        script = await get(http, w.address, "/ui/main.js")
        assert script.content_type == "text/javascript"
        same = await get(
            http, w.address, "/ui/main.js", **{"If-None-Match": script.headers["ETag"]}
        )
        assert same.status == 304
        for path in ("/ui/no.js", "/ui/../v1/status", "/ui/%2e%2e%2fpage.py", "/ui/..", "/ui/a/b"):
            assert (await get(http, w.address, path)).status in (401, 404), path


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/main.js", "/ui/live"])
async def test_a_name_that_is_not_this_hosts_is_refused(path: str) -> None:
    """DNS rebinding: the browser believes that this is evil.example."""
    async with world() as w, browser() as http:
        answer = await get(http, w.address, path, Host=f"evil.example:{w.address.port}")
        assert answer.status == 403
        assert "address in figures" in (await answer.json())["error"]
        assert w.donor.server.counters["pages_refused"] == 1


async def test_pages_of_other_origins_get_nothing() -> None:
    async with world() as w, browser() as http:
        for origin in ("https://evil.example", "null", f"http://{w.address}"):
            for path in ("/ui/", "/ui/live", m.STATUS_PATH, m.NONCE_PATH, m.VERSION_PATH):
                answer = await get(http, w.address, path, Origin=origin)
                assert answer.status == 403, (origin, path)
            url = f"https://{w.address}/ui/live"
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(url, origin=origin)
            assert refused.value.status == 403
        # The page itself may ask for its own files, and for nothing else.
        own = f"https://{w.address}"
        assert (await get(http, w.address, "/ui/", Origin=own)).status == 200
        assert (await get(http, w.address, m.STATUS_PATH, Origin=own)).status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"https://{w.address}/ui/live")
        assert refused.value.status == 403


# ------------------------------------------------------------------------------ signing in


async def test_a_link_lets_one_browser_in_once() -> None:
    async with world() as w, browser() as http:
        assert "infiniswap ui" in await why_not(w)
        link = await link_to(w)
        async with live(http, w.address, link=link) as ws:
            session = (await heard(ws, "in"))["session"]
            look = await heard(ws, "look")
            assert [row["address"] for row in look["donors"]] == [str(w.address)]
        assert "used before" in await why_not(w, link=link)
        assert "infiniswap ui" in await why_not(w, session="0" * 32)
        assert "infiniswap ui" in await why_not(w, session=link)
        async with live(http, w.address, session=session) as ws:
            assert (await heard(ws, "in"))["session"] == session


async def test_only_who_may_read_the_status_gets_a_link() -> None:
    async with world() as w, browser() as http:
        async with http.post(f"https://{w.address}{m.PAGE_LINK_PATH}") as answer:
            assert answer.status == 401
        with pytest.raises(WrongSecretError):
            await make_page_link(w.address, client_config(keys=None))
        made = await make_page_link(w.address, client_config())
        assert made.certificate == w.donor.server._config.tls.digest.hex()


async def test_a_daemon_of_an_earlier_release_has_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        monkeypatch.setattr(m, "PAGE_LINK_PATH", "/v1/something-new")
        with pytest.raises(ProtocolMismatchError, match="earlier release"):
            await make_page_link(w.address, client_config())


async def test_without_a_secret_every_user_of_the_host_is_let_in(tmp_path: Path) -> None:
    """As by the Unix socket; nobody else reaches that daemon."""
    run_dir = str(tmp_path / "run")
    async with (
        world(cluster__secret_file=None, daemon__run_dir=run_dir) as w,
        browser() as http,
        live(http, w.address) as ws,
    ):
        assert (await heard(ws, "in"))["session"] == ""
        await heard(ws, "look")
    async with world(cluster__secret_file=None, daemon__run_dir="") as w:  # no socket either
        assert "infiniswap ui" in await why_not(w)


@pytest.mark.parametrize("said", ["[]", "x", '{"link":1}', '{"link":"' + "0" * 100 + '"}'])
async def test_a_browser_that_says_anything_else_is_cut_off(said: str) -> None:
    async with (
        world() as w,
        browser() as http,
        http.ws_connect(f"https://{w.address}/ui/live", origin=f"https://{w.address}") as ws,
    ):
        await ws.send_str(said)
        assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_who_speaks_again_is_cut_off() -> None:
    async with world() as w, browser() as http, live(http, w.address, link=await link_to(w)) as ws:
        await heard(ws, "look")
        await ws.send_str("{}")
        async with asyncio.timeout(WAIT_S):
            while (await ws.receive()).type is aiohttp.WSMsgType.TEXT:
                pass


async def test_a_silent_browser_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_SIGN_IN_S", 0.1)
    async with (
        world() as w,
        browser() as http,
        http.ws_connect(f"https://{w.address}/ui/live", origin=f"https://{w.address}") as ws,
    ):
        assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_browsers_that_have_not_signed_in_take_no_viewers_place() -> None:
    async with world() as w, browser() as http:
        origin = f"https://{w.address}"
        unsigned = [
            await http.ws_connect(f"{origin}/ui/live", origin=origin) for _ in range(VIEWERS_MAX)
        ]
        async with live(http, w.address, link=await link_to(w)) as ws:
            await heard(ws, "look")
        assert len(unsigned) == VIEWERS_MAX  # kept open until here


async def test_only_so_many_watch_at_once() -> None:
    async with world() as w, browser() as http, contextlib.AsyncExitStack() as held:
        for _ in range(VIEWERS_MAX):
            ws = await held.enter_async_context(live(http, w.address, link=await link_to(w)))
            session = (await heard(ws, "in"))["session"]
        async with live(http, w.address, session=session) as surplus:
            out = await heard(surplus, "out")
        assert "Close one" in out["why"]
        assert not out["sign_in"]  # the page tries again
        await ws.close()
        while True:  # until the daemon has seen that it is closed
            async with live(http, w.address, session=session) as another:
                if (await another.receive_json())["kind"] == "in":
                    break


# ----------------------------------------------------------------------------- certificates


async def test_with_certificates_the_browsers_role_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    consumer = client_with(authority.files("h1", [Role.CONSUMER]))
    lender = client_with(authority.files("h2", [Role.DONOR]))
    assert consumer.credentials is not None
    assert lender.credentials is not None
    async with certified_donor(authority) as w:
        async with (
            browser(consumer.credentials.client) as http,
            live(http, w.address) as ws,
        ):
            assert (await heard(ws, "in"))["session"] == ""
            await heard(ws, "look")
        async with (
            browser(lender.credentials.client) as http,
            live(http, w.address) as ws,
        ):
            why = (await heard(ws, "out"))["why"]
            assert "consumer or operator" in why
            assert "role operator" in why
        with pytest.raises(aiohttp.ClientError):
            async with browser() as http:
                await get(http, w.address, "/ui/")


async def test_a_donor_that_this_daemon_may_not_read_says_so_with_the_remedy(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "authority")
    consumer = client_with(authority.files("h1", [Role.CONSUMER]))
    assert consumer.credentials is not None
    async with certified_donor(authority, files=authority.files("d2", BOTH)) as other:
        lends_only = authority.files("d1", [Role.DONOR])
        peers = {"cluster__peers": str(other.address)}
        async with (
            certified_donor(authority, files=lends_only, **peers) as w,
            browser(consumer.credentials.client) as http,
            live(http, w.address) as ws,
        ):
            own, peer = (await heard(ws, "look"))["donors"]
    assert (own["name"], own["answers"]) == ("d1", True)
    assert (peer["state"], peer["answers"]) == ("wrong certificate", False)
    assert "role consumer or operator" in peer["error"]


# ---------------------------------------------------------------------------------- looks


async def test_slabs_and_what_their_device_says_are_in_the_status_and_on_the_page() -> None:
    handler = Handler()
    handler.rates, handler.device = {0: 12.5}, FIGURES
    async with world() as w, await w.session(handler) as session:
        lease = await session.lease(4)
        await session.map(lease.lease, 2)
        (said,) = (await fetch_status(w.address, client_config())).leases
        assert said.slabs == [m.SlabUse(2, 12.5)]
        assert said.device == FIGURES
        async with browser() as http, live(http, w.address, link=await link_to(w)) as ws:
            look = await heard(ws, "look")
        (device,) = look["devices"]
        assert device["cells"] == [[2, [0], 12.5]]
        assert (device["slabs"], device["page_in_us_p50"]) == (4, 40.0)


async def test_the_watch_shows_peers_and_what_happens_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClusterWatch.__init__, "__defaults__", (0.05, 60.0))
    async with world() as other:
        peers: dict[str, Any] = {"cluster__peers": str(other.address), "daemon__name": "sun"}
        async with world(**peers) as w, browser() as http:
            async with live(http, w.address, link=await link_to(w)) as ws:
                session = (await heard(ws, "in"))["session"]
                look = await heard(ws, "look")
                assert [row["answers"] for row in look["donors"]] == [True, True]
                assert look["by"] == "sun"
                await other.donor.server.stop()
                async with asyncio.timeout(WAIT_S):
                    while not (look := await heard(ws, "look"))["events"]:
                        pass
            (event,) = look["events"]
            assert event["tone"] == "bad"
            assert "unreachable" in event["text"]
            assert not look["donors"][1]["answers"]
            assert look["donors"][1]["segments"]["own"] >= 0
            # Who comes later is told the past.
            async with live(http, w.address, session=session) as ws:
                past = await heard(ws, "past")
            assert event in past["events"]
            assert len(past["samples"]) >= 2


def task_names() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()}


async def test_nobody_is_asked_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterWatch.__init__, "__defaults__", (0.02, 0.0))
    async with world() as w, browser() as http:
        assert "page" not in task_names()
        async with live(http, w.address, link=await link_to(w)) as ws:
            await heard(ws, "look")
            assert "page" in task_names()
        await until(lambda: "page" not in task_names())


async def test_a_daemon_that_stops_ends_the_pages_that_watch_it() -> None:
    async with browser() as http:
        async with world() as w:
            ws = await http.ws_connect(
                f"https://{w.address}/ui/live", origin=f"https://{w.address}"
            )
            await ws.send_json({"link": await link_to(w)})
            await heard(ws, "look")
            begun_s = time.monotonic()
        assert time.monotonic() - begun_s < WAIT_S
        async with asyncio.timeout(WAIT_S):
            while (await ws.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
