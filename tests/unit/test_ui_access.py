# SPDX-License-Identifier: Apache-2.0
"""infiniswap.ui: which browsers are let in, and what the files of the page may contain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from infiniswap.cli.ui import reachable, said
from infiniswap.control import messages as m
from infiniswap.ui import assets, browsers
from infiniswap.ui.links import LINK_S, LINKS_MAX, SESSION_S, SESSIONS_MAX, Links
from infiniswap.units import HostPort, parse_host_port

NAMES = {"sun"}


# ---------------------------------------------------------------------- Host and Origin


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:9400", "10.0.0.1", "[::1]:9400", "[fe80::1]", "localhost:1", "SUN:9400", "sun."],
)
def test_an_address_in_figures_or_a_name_of_this_host_is_answered(host: str) -> None:
    assert browsers.host_problem(host, NAMES) == ""


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:9400", "sun.evil.example", "127.0.0.1.evil.example", "", "1.2.3", "[::1"),
        *("localhost.evil.example", "user@127.0.0.1", "127.0.0.1:x", "127.0.0.1:9400/", "0x7f.1"),
    ],
)
def test_every_other_name_is_refused_with_the_remedy(host: str) -> None:
    assert "by the address in figures" in browsers.host_problem(host, NAMES)


@pytest.mark.parametrize(
    ("origin", "is_needed", "is_refused"),
    [
        ("https://127.0.0.1:9400", True, False),
        ("HTTPS://127.0.0.1:9400", True, False),
        (None, False, False),
        (None, True, True),
        ("null", True, True),
        ("http://127.0.0.1:9400", True, True),
        ("https://127.0.0.1:9401", True, True),
        ("https://127.0.0.1:9400.evil.example", True, True),
        ("https://evil.example", False, True),
    ],
)
def test_only_the_page_itself_may_ask(
    origin: str | None, is_needed: bool, is_refused: bool
) -> None:
    found = browsers.origin_problem(origin, "127.0.0.1:9400", is_needed=is_needed)
    assert bool(found) == is_refused


def test_the_policy_allows_nothing_inline_and_no_other_host() -> None:
    rules = dict(
        rule.strip().split(" ", 1)
        for rule in browsers.HEADERS["Content-Security-Policy"].split(";")
    )
    assert rules.pop("default-src") == "'none'"
    assert rules.pop("frame-ancestors") == "'none'"
    assert rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'self'"}
    assert browsers.HEADERS["X-Content-Type-Options"] == "nosniff"


# -------------------------------------------------------------------------------- links


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def links(time: Time) -> Links:
    numbers = iter(range(1, 10_000))
    return Links(time, lambda count: next(numbers).to_bytes(count, "big"))


def test_a_link_is_good_once(links: Links) -> None:
    link = links.make()
    session = links.begin(link)
    assert session
    assert links.begin(link) == ""
    assert links.resume(session)
    assert not links.resume(link)
    assert links.begin(session) == ""


def test_a_link_is_good_for_five_minutes(links: Links, time: Time) -> None:
    late, early = links.make(), links.make()
    time.now_s += LINK_S
    assert links.begin(early)
    time.now_s += 1
    assert links.begin(late) == ""


def test_a_session_ends_when_nobody_uses_it(links: Links, time: Time) -> None:
    session = links.begin(links.make())
    for _ in range(3):
        time.now_s += SESSION_S - 1
        assert links.resume(session)
    time.now_s += SESSION_S + 1
    assert not links.resume(session)
    assert not links.resume(session)


def test_links_and_sessions_are_limited_the_oldest_goes_first(links: Links) -> None:
    made = [links.make() for _ in range(LINKS_MAX + 1)]
    assert links.begin(made[0]) == ""
    sessions = [links.begin(link) for link in made[1:]]
    assert all(sessions)
    assert links.resume(sessions[0])  # the last one now
    more = [links.begin(links.make()) for _ in range(SESSIONS_MAX - len(sessions) + 1)]
    assert all(map(links.resume, more))
    assert links.resume(sessions[0])
    assert not links.resume(sessions[1])


@pytest.mark.parametrize("token", ["", "0" * 32, "\ud800", "é" * 32])
def test_anything_else_lets_nobody_in(links: Links, token: str) -> None:
    links.make()
    assert links.begin(token) == ""
    assert not links.resume(token)


# ------------------------------------------------------------------------------ command


def made(**changes: Any) -> m.PageLink:
    return m.PageLink(
        **{
            "donor_id": "00000000-0000-0000-0000-00000000000a",
            "donor_name": "sun",
            "link": "ab" * 16,
            "valid_s": 300,
            "certificate": "cd" * 32,
            **changes,
        }
    )


def test_the_command_prints_link_fingerprint_and_way_from_afar() -> None:
    lines = said(parse_host_port("127.0.0.1:9400"), made(), None)
    assert lines[0] == f"https://127.0.0.1:9400/ui/#{'ab' * 16}"
    assert "CD:CD" in "\n".join(lines)
    assert "ssh -L 9400:127.0.0.1:9400 " in lines[-1]
    assert "ssh" not in "\n".join(said(parse_host_port("[fd00::1]:9400"), made(), None))
    assert said(parse_host_port("[fe80::1%eth0]:9400"), made(), None)[0].startswith(
        "https://[fe80::1%25eth0]:9400/ui/"
    )


def test_with_certificates_the_link_holds_nothing_and_the_browser_needs_one() -> None:
    lines = said(parse_host_port("10.0.0.1:9400"), made(), Path("/etc/infiniswap"))
    assert lines[0] == "https://10.0.0.1:9400/ui/"
    assert "openssl pkcs12 -export" in "\n".join(lines)
    assert "ab" * 16 not in "\n".join(lines)


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("0.0.0.0:9400", HostPort("127.0.0.1", 9400)),
        ("[::]:9400", HostPort("::1", 9400)),
        ("10.0.0.1:9400", HostPort("10.0.0.1", 9400)),
        ("sun:9400", HostPort("sun", 9400)),
    ],
)
def test_a_daemon_that_listens_everywhere_is_asked_over_loopback(
    listen: str, found: HostPort
) -> None:
    assert reachable(parse_host_port(listen)) == found


# -------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: asset.body.decode() for name, asset in assets.load().items()}


def test_the_whole_page_is_below_200_kb(texts: dict[str, str]) -> None:
    assert {"index.html", "main.js", "style.css"} <= texts.keys()
    assert sum(len(text.encode()) for text in texts.values()) < 200_000


def test_every_file_that_one_names_is_there_and_none_is_on_another_host(
    texts: dict[str, str],
) -> None:
    for name, text in texts.items():
        named = re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"', text)
        for found in {one or other for one, other in named}:
            assert found in texts, f"{name} names {found}"
        spaces = {"http://www.w3.org/2000/svg"}  # a name, never fetched
        assert set(re.findall(r"\bhttps?://[^\"'`\s)]+", text)) <= spaces, name
        assert "//" not in "".join(re.findall(r'(?:src|href)="([^"]+)"', text)), name
        assert "@import" not in text, name
        assert "url(" not in text, name


def test_others_text_never_becomes_html_and_nothing_is_inline(texts: dict[str, str]) -> None:
    sinks = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment"
        r"|setHTML|srcdoc|\beval\b|new Function|javascript:|setTimeout\(\s*[\"'`]"
    )
    for name, text in texts.items():
        assert not sinks.search(text), name
    page = texts["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=|<style", page)
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="main.js">']
    assert "</script>" in page


def test_nothing_is_written_by_the_page(texts: dict[str, str]) -> None:
    """It asks for its own files, and says who it is."""
    scripts = "\n".join(text for name, text in texts.items() if name.endswith(".js"))
    assert not re.search(r"\bfetch\(|XMLHttpRequest|sendBeacon|EventSource", scripts)
    assert scripts.count(".send(") == 1
