# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.peer."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.control.peer import THIS_HOST, consumer_of, peer_of
from infiniswap.units import HostPort

V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6)


def test_a_host_of_ipv4_is_its_address() -> None:
    assert peer_of("10.0.0.2") == "10.0.0.2"
    assert peer_of("10.0.0.2") != peer_of("10.0.0.3")


@given(V4)
def test_ipv4_mapped_to_ipv6_is_ipv4(address: ipaddress.IPv4Address) -> None:
    assert peer_of(f"::ffff:{address}") == peer_of(str(address))
    assert consumer_of(f"[::ffff:{address}]:9400") == consumer_of(f"{address}:9400")


@given(V6, st.integers(0, 2**64 - 1))
def test_a_host_of_ipv6_is_its_network(address: ipaddress.IPv6Address, number: int) -> None:
    if address.ipv4_mapped is not None:
        return
    another = ipaddress.IPv6Address(int(address) >> 64 << 64 | number)
    if another.ipv4_mapped is None and not (another.is_loopback or address.is_loopback):
        assert peer_of(str(another)) == peer_of(str(address))
    next_network = ipaddress.IPv6Address((int(address) + (1 << 64)) % (1 << 128))
    assert peer_of(str(next_network)) != peer_of(str(address))


def test_networks_of_two_links_are_two() -> None:
    assert peer_of("fe80::1%eth0") == peer_of("fe80::2%eth0")
    assert peer_of("fe80::1%eth0") != peer_of("fe80::1%eth1")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2", "127.255.3.4", "::1", "::ffff:127.0.0.9"]
)
def test_loopback_is_one_host(host: str) -> None:
    assert consumer_of(str(HostPort(host, 41_000))) == peer_of(host) == THIS_HOST


@pytest.mark.parametrize("text", ["", "unknown", "donor1", "a%b", "[", "999.1.1.1"])
def test_what_is_no_address_stands_for_itself(text: str) -> None:
    assert peer_of(text) == text


def test_the_port_does_not_count() -> None:
    assert consumer_of("10.0.0.2:1") == consumer_of("10.0.0.2:2") == "10.0.0.2"
    assert consumer_of("[fd00::1]:1") == consumer_of("[fd00::2]:2") == "fd00::/64"
