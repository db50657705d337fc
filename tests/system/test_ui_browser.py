# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: a donor is killed while it is watched; everybody can use it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pictures.browser import chromium
from support.devices.cluster import SLAB, Cluster, Device, Donor
from support.devices.nbd_client import ask, connected
from support.machine.chromium import Seen

from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_tool("chromium"),
    # Of playwright's driver: asyncio objects that its own thread ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SLABS = 6
HTML = "<b>moon</b>"
_WRITE = 1


class Writer:
    """Keeps every slab of a device busy while the block lasts."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer")

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with connected(self._device.socket) as client:
            page = 0
            while not self._ended.wait(0.002):
                offset = page % SLABS * SLAB + page // SLABS % 64 * PAGE_BYTES
                ask(client, _WRITE, offset, os.urandom(PAGE_BYTES))
                page += 1


@dataclass
class Watched:
    """Donors sun and one whose name is HTML; sun serves the page. A device pages to both."""

    cluster: Cluster
    sun: Donor
    moon: Donor
    device: Device

    @property
    def link(self) -> str:
        return self.cluster.ok("ui", self.sun.address).splitlines()[0]


@contextlib.contextmanager
def watching(cluster: Cluster, *options_of_moon: str) -> Iterator[Watched]:
    cluster.env["INFINISWAP_CLUSTER_ASK_S"] = "2"
    moon = cluster.donor("--name", HTML, *options_of_moon)
    sun = cluster.donor("--name", "sun", "--peers", moon.address)
    device = cluster.start("--frontend", "nbd-socket", size=f"{SLABS * SLAB // MIB}M")
    with Writer(device):
        yield Watched(cluster, sun, moon, device)


@pytest.fixture
def watched(cluster: Cluster) -> Iterator[Watched]:
    with watching(cluster) as made:
        yield made


def texts(seen: Seen, selector: str) -> str:
    return "\n".join(seen.page.locator(selector).all_inner_texts())


def wait_for(seen: Seen, condition: str) -> None:
    seen.page.wait_for_function(condition)


ON_BOTH = """() => ["on sun", "on <b>moon</b>"].every(
    (words) => [...document.querySelectorAll(".cell")].some(
        (cell) => cell.getAttribute("aria-label").includes(words)))"""

ALL_ON_SUN = """() => [...document.querySelectorAll(".cell")].every(
    (cell) => cell.getAttribute("aria-label").includes("on sun"))"""


def test_a_donor_is_killed_while_somebody_watches(watched: Watched) -> None:
    with chromium() as browser:
        context = browser.new_context(ignore_https_errors=True)
        seen = Seen.of(context)
        seen.page.goto(watched.link)
        wait_for(seen, ON_BOTH)
        assert "#" not in seen.page.url  # nobody copies the link
        assert seen.page.locator(".cell").count() == SLABS
        # A donor's name is text, whatever is in it.
        assert HTML in texts(seen, ".host h3")
        assert seen.page.locator("b").count() == 0
        wait_for(
            seen, "() => document.querySelector('.device .figures').innerText.includes('out ')"
        )
        assert seen.inaccessible() == []

        watched.moon.end(signal.SIGKILL)
        seen.page.locator(".host.silent", has_text="unreachable").wait_for()
        seen.page.locator(".events .bad", has_text=f"{HTML}: unreachable").wait_for()
        # The device gives it up, and its slabs find the donor that is left.
        wait_for(seen, ALL_ON_SUN)
        assert not seen.page.locator("body.stale").count()
        assert seen.complaints == []
        assert seen.hosts == {watched.sun.address}


@contextlib.contextmanager
def page_of(watched: Watched) -> Iterator[Seen]:
    """Opened, with every slab on it."""
    with chromium() as browser:
        seen = Seen.of(browser.new_context(ignore_https_errors=True))
        seen.page.goto(watched.link)
        wait_for(seen, ON_BOTH)
        yield seen


@pytest.mark.full
def test_slabs_are_seen_to_move_off_a_donor_that_is_drained(watched: Watched) -> None:
    with page_of(watched) as seen:
        watched.cluster.ok("donor", "drain", watched.moon.address)
        moved = f"is on sun, and has left {HTML}"
        seen.page.locator(".events li", has_text=moved).first.wait_for()
        wait_for(seen, ALL_ON_SUN)
        seen.page.locator(".host", has_text="drained").wait_for()
        assert seen.complaints == []


@pytest.fixture
def host_of_moon() -> Iterator[MemoryCgroup]:
    """What its donor takes for the memory of its host."""
    made = create_memory_cgroup(f"infiniswap-test-{os.getpid()}", 256 * MIB)
    yield made
    made.kill()
    made.remove()


@pytest.mark.full
@pytest.mark.requires_memcg
def test_an_eviction_is_seen(cluster: Cluster, host_of_moon: MemoryCgroup) -> None:
    """A program of the donor's host takes all memory but half of the headroom."""
    taking = f"import os, time; os.read(0, 1); x = bytearray({248 * MIB}); time.sleep(600)"
    command = [sys.executable, "-c", taking]
    with (
        watching(cluster, "--memory-cgroup", str(host_of_moon.path)) as watched,
        page_of(watched) as seen,
        subprocess.Popen(command, stdin=subprocess.PIPE) as program,
    ):
        try:
            host_of_moon.add(program.pid)
            assert program.stdin is not None
            program.stdin.close()
            seen.page.locator(".events .bad", has_text=f"{HTML}: took back").first.wait_for()
            assert seen.complaints == []
        finally:
            program.kill()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_everybody_can_use_it(watched: Watched, scheme: Any, width: int) -> None:
    with chromium() as browser:
        context = browser.new_context(
            ignore_https_errors=True,
            color_scheme=scheme,
            viewport={"width": width, "height": 800},
        )
        seen = Seen.of(context)
        seen.page.goto(watched.link)
        wait_for(seen, ON_BOTH)
        assert seen.inaccessible() == []
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width

        # By keyboard alone: the button, then the cells.
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement.id") == "pause"
        seen.page.keyboard.press("Tab")
        seen.page.keyboard.press("ArrowRight")
        seen.page.keyboard.press("End")
        seen.page.keyboard.press("ArrowLeft")
        active = "document.getElementById(document.activeElement.getAttribute('{}')).ariaLabel"
        words = seen.page.evaluate(active.format("aria-activedescendant"))
        assert words.startswith(f"slab {SLABS - 2} ")
        assert texts(seen, ".readout").strip() == words

        watched.moon.end(signal.SIGKILL)
        seen.page.locator(".host.silent", has_text="s old").wait_for()
        assert seen.inaccessible() == []
        assert seen.complaints == []


@pytest.mark.full
def test_figures_look_old_when_the_daemon_of_the_page_dies(watched: Watched) -> None:
    with page_of(watched) as seen:
        # A reload and a tab of its own: the session is this tab's.
        seen.page.reload()
        wait_for(seen, ON_BOTH)

        watched.sun.end(signal.SIGKILL)
        seen.page.locator("body.stale").wait_for()
        notice = seen.page.locator("#notice")
        assert "The daemon of sun does not answer" in notice.inner_text()
        assert seen.page.locator(".cell").count() == SLABS
        assert seen.inaccessible() == []

        # Its successor knows nobody who was signed in, but here every user may read.
        watched.cluster.successor(watched.sun)
        wait_for(seen, "() => !document.body.classList.contains('stale')")


@pytest.mark.full
def test_pause_stops_the_picture(watched: Watched) -> None:
    with page_of(watched) as seen:
        seen.page.get_by_role("button", name="Pause").click()
        seen.page.locator("#notice", has_text="Paused").wait_for()
        before = texts(seen, "#summary")
        watched.moon.end(signal.SIGKILL)
        seen.page.locator(".events .bad").first.wait_for()  # events are collected meanwhile
        assert texts(seen, "#summary") == before
        assert seen.page.locator(".host.silent").count() == 0
        seen.page.get_by_role("button", name="Pause").click()
        seen.page.locator(".host.silent").wait_for()


@pytest.mark.full
def test_who_may_not_read_gets_a_sentence(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = ""  # no socket, so users of this host may not either
    donor = cluster.donor()
    with chromium() as browser:
        context = browser.new_context(ignore_https_errors=True)
        seen = Seen.of(context)
        seen.page.goto(f"https://{donor.address}/ui")
        seen.page.locator("#why", has_text="Run `infiniswap ui`").wait_for()
        assert seen.inaccessible() == []
        link = cluster.ok("ui", donor.address).splitlines()[0]
        other = Seen.of(context)
        other.page.goto(link)
        other.page.locator(".host").wait_for()
        seen.page.goto(link)
        seen.page.locator("#why", has_text="This link is not good").wait_for()
        assert seen.complaints == []

        none = Seen.of(context)
        none.page.add_init_script("delete globalThis.WebSocket")
        none.page.goto(link)
        none.page.locator("#why", has_text="This browser has no WebSocket").wait_for()
