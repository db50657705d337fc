# SPDX-License-Identifier: Apache-2.0
"""Sizes, pages and addresses."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infiniswap
from infiniswap.errors import UsageError
from infiniswap.units import (
    CONTROL_PORT,
    GIB,
    KIB,
    MIB,
    PAGE_BYTES,
    SIZE_BYTES_MAX,
    HostPort,
    counted,
    format_size,
    format_size_short,
    is_loopback,
    letter_meant,
    pages_for,
    parse_host_port,
    parse_host_ports,
    parse_page_size,
    parse_share,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512M", 512 * MIB),
        ("1G", GIB),
        ("1.5G", 3 * GIB // 2),
        ("64 KiB", 64 * KIB),
        ("4Gi", 4 * GIB),
        ("1.5 mi", 3 * MIB // 2),
        ("2gb", 2 * GIB),
        (" 1k ", KIB),
        ("100B", 100),
        ("0.5K", 512),
        ("4611686018427387904", SIZE_BYTES_MAX),
    ],
)
def test_sizes_are_binary(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "G", "-1", "+1", "1.G", ".5G", "1Q", "1e9", "0x10"),
        *("1 G B", "12ib", "12i", "1_000", "٣", "nan"),
    ],
)
def test_what_is_not_a_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "512M" in caught.value.mend


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="whole number of bytes"):
        parse_size("0.3K")


def test_a_size_above_the_largest_is_refused() -> None:
    with pytest.raises(UsageError, match="too large"):
        parse_size(str(SIZE_BYTES_MAX + 1))
    with pytest.raises(UsageError, match="too large"):
        parse_size("99999999999999999999P")


@given(st.integers(0, SIZE_BYTES_MAX))
def test_formatting_then_parsing_gives_the_same_size(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert 0 <= parse_size(text) <= SIZE_BYTES_MAX


@pytest.mark.parametrize("text", ["4097", "1B", "0", "0.5K"])
def test_a_page_size_must_be_a_multiple_of_a_page(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_page_size(text)
    nearest = caught.value.mend.removeprefix("The nearest that fits is ").removesuffix(".")
    assert parse_page_size(nearest) % PAGE_BYTES == 0


@pytest.mark.parametrize(("text", "meant"), [("3", "3G"), (" 64 ", "64G"), ("512", "512M")])
def test_a_size_without_its_letter_is_guessed(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_page_size(text)
    assert f"Did you mean {meant}?" in caught.value.mend


def test_the_letter_that_is_guessed_gives_a_size_that_fits() -> None:
    assert letter_meant(8, 64 * GIB) == letter_meant(8)
    assert "8M?" in letter_meant(8, GIB)
    assert letter_meant(0) == letter_meant(PAGE_BYTES) == ""


@pytest.mark.parametrize(
    ("text", "share"),
    [("50%", Fraction(1, 2)), ("12.5 %", Fraction(1, 8)), ("100%", Fraction(1)), ("50", None)],
)
def test_a_percentage_is_a_share(text: str, share: Fraction | None) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "100.5%"])
def test_no_share_is_nothing_or_more_than_all(text: str) -> None:
    with pytest.raises(UsageError, match="no share of the memory"):
        parse_share(text)


@given(st.integers(0, 1 << 50))
def test_pages_hold_the_bytes_and_not_one_page_more(size_bytes: int) -> None:
    pages = pages_for(size_bytes)
    assert 0 <= pages * PAGE_BYTES - size_bytes < PAGE_BYTES
    assert round_up(size_bytes, PAGE_BYTES) == pages * PAGE_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (GIB, "1.00 GiB"),
        (312 * MIB, "312 MiB"),
        (int(15.25 * GIB), "15.2 GiB"),
        (2000 << 50, "2000 PiB"),
    ],
)
def test_short_sizes_have_about_three_digits(size_bytes: int, text: str) -> None:
    assert format_size_short(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("donor1", HostPort("donor1", CONTROL_PORT)),
        ("donor1:9500", HostPort("donor1", 9500)),
        ("10.0.0.2:1", HostPort("10.0.0.2", 1)),
        ("[::1]:9400", HostPort("::1", 9400)),
        ("[fd00::1]", HostPort("fd00::1", CONTROL_PORT)),
        ("fd00::1", HostPort("fd00::1", CONTROL_PORT)),
        ("[fe80::1%eth0]:9400", HostPort("fe80::1%eth0", CONTROL_PORT)),
        ("10.91.7.30", HostPort("10.91.7.30", CONTROL_PORT)),
        ("node.7", HostPort("node.7", CONTROL_PORT)),
        (" a.b-c.d ", HostPort("a.b-c.d", CONTROL_PORT)),
        ("localhost:0", HostPort("localhost", 0)),
    ],
)
def test_addresses(text: str, expected: HostPort) -> None:
    assert parse_host_port(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":", ":80", "a:", "a:b", "a:65536", "a:-1", "[::1", "[::1]9400", "[a]:1", "a b", "1:2:3",
     "http://a", "a/b", "a:999999",
     "fe80::1%\x1b[2J", "[fe80::1%a\nb]:1", "fe80::1%0123456789abcdef"],
)  # fmt: skip
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"address|port"):
        parse_host_port(text)


@pytest.mark.parametrize("text", ["10.91.7.300", "10.91.7", "10.91.7.30.", "7", "1.2.3.4.5:9400"])
def test_figures_are_an_ipv4_address_or_refused(text: str) -> None:
    with pytest.raises(UsageError, match="IPv4 has four numbers of 0 to 255"):
        parse_host_port(text)


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("fe80::1", "[fe80::1%eth0]"),
        ("[fe80::1]", "[fe80::1%eth0]"),
        ("[fe80::1]:9400", "[fe80::1%eth0]:9400"),
        ("[febf::1]:9400", "[febf::1%eth0]:9400"),
        ("fe80::1:9650", "[fe80::1%eth0]:9650"),
        ("fe80::1:965a", "[fe80::1:965a%eth0]"),
        ("fe80::9650", "[fe80::9650%eth0]"),
    ],
)
def test_link_local_needs_an_interface(text: str, example: str) -> None:
    with pytest.raises(UsageError, match="link-local") as raised:
        parse_host_port(text)
    assert raised.value.mend == f"Name this host's interface too, for example {example}."


def test_a_uri_has_the_interface_of_an_address_escaped() -> None:
    """RFC 6874: what follows a bare % would be read as an escape."""
    assert HostPort("fe80::1%be0", 9401).in_uri == "[fe80::1%25be0]:9401"
    assert HostPort("fd00::1", 9401).in_uri == "[fd00::1]:9401"
    assert HostPort("node1", 9401).in_uri == "node1:9401"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0::0", ""])
def test_wildcards_in_any_spelling(host: str) -> None:
    assert HostPort(host, 1).is_wildcard
    assert not HostPort("10.0.0.1", 1).is_wildcard
    assert not HostPort("node1", 1).is_wildcard


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_an_address_survives_text(address: IPv4Address | IPv6Address, port: int) -> None:
    zone = "%eth0" if address.version == 6 and address.is_link_local else ""
    value = HostPort(f"{address}{zone}", port)
    assert parse_host_port(str(value), default_port=7) == value


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    try:
        value = parse_host_port(text)
    except UsageError:
        return
    assert value.host
    assert 0 <= value.port <= 65_535


def test_lists_drop_duplicates_and_keep_order() -> None:
    assert parse_host_ports("b, a:9400,,b:9400") == (HostPort("b", 9400), HostPort("a", 9400))
    assert parse_host_ports("") == ()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "localhost.", "ip6-localhost",
     "a.localhost", "localhost.localdomain"],
)  # fmt: skip
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "h", "mylocalhost"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "slab", "0 slabs"), (1, "slab", "1 slab"), (3, "process", "3 processes")],
)
def test_one_of_a_kind_is_in_the_singular(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


_SINGLE = re.compile(r"(?:\{[^{}]*\}|%d) (?:lent |more |data )?(?:slabs|leases|measurements)\b")
_OF_SEVERAL = ("limit of", "SESSION_LEASES_MAX", "registered", "_SLABS", "of its", " for {len(")


def test_no_sentence_counts_1_slabs() -> None:
    package = Path(infiniswap.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if _SINGLE.search(line) and not any(words in line for words in _OF_SEVERAL)
    ]
    assert not found
