# SPDX-License-Identifier: Apache-2.0
"""Which peer an address belongs to, for limits per peer. Pure.

A peer chooses its names and ids, and can invent any number of them. It cannot invent an address at
which it gets answers, except within its own network.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final, Self

THIS_HOST: Final = "this host"
"""Every loopback address: a program of this host connects from any of millions."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The other end of a connection.

    Attributes:
        address: HOST:PORT.
        peer: whom it counts for.
    """

    address: str
    peer: str

    def __str__(self) -> str:
        return self.address

    @classmethod
    def at(cls, address: str, peer: str = "") -> Self:
        """Makes one that counts for its address, if nothing better is known."""
        return cls(address, peer or consumer_of(address))


def peer_of(host: str) -> str:
    """The peer that an address counts for: an IPv4 address, a /64 network of IPv6, or THIS_HOST.

    Args:
        host: an address as a socket shows it; IPv4 mapped to IPv6 is IPv4. Any other text stands
            for itself.
    """
    address = _parse(host)
    if address is not None and address.is_loopback:
        return THIS_HOST
    if not isinstance(address, ipaddress.IPv6Address):
        return host if address is None else str(address)
    network = ipaddress.IPv6Network((int(address) >> 64 << 64, 64))
    return f"{network}%{address.scope_id}" if address.scope_id else str(network)


def consumer_of(address: str) -> str:
    """The peer of HOST:PORT."""
    return peer_of(host_of(address))


def host_of(address: str) -> str:
    """The host of HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def unmapped(host: str) -> str:
    """An address as people write it: IPv4 in IPv6 is IPv4. Other text stays as it is."""
    parsed = _parse(host)
    return str(parsed) if isinstance(parsed, ipaddress.IPv4Address) else host
