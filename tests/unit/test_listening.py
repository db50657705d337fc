# SPDX-License-Identifier: Apache-2.0
"""Addresses to listen on: resolved, judged, opened."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from infiniswap.control.listening import bound_to, check_is_here, check_reach, open_sockets
from infiniswap.errors import ConfigError
from infiniswap.units import HostPort


def reached(host: str, port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=10).close()
        return True
    return False


@pytest.mark.requires_ipv6
@pytest.mark.parametrize(
    ("host", "over_ipv4", "over_ipv6", "said"),
    [
        ("::", True, True, "[::]:{} (IPv6 and IPv4)"),
        ("0.0.0.0", True, False, "0.0.0.0:{}"),
        ("::1", False, True, "[::1]:{}"),
        ("127.0.0.1", True, False, "127.0.0.1:{}"),
    ],
)
def test_the_wildcard_of_ipv6_stands_for_ipv4_too(
    host: str, over_ipv4: bool, over_ipv6: bool, said: str
) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in open_sockets(HostPort(host, 0))]
        port = sockets[0].getsockname()[1]
        assert (reached("127.0.0.1", port), reached("::1", port)) == (over_ipv4, over_ipv6)
        assert bound_to(sockets) == said.format(port)
        assert bound_to(sockets, 7) == said.format(7)


def test_a_port_in_use_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use") as raised:
            open_sockets(HostPort("0.0.0.0", port))
        assert raised.value.errno == errno.EADDRINUSE


def test_a_name_that_nobody_knows_is_a_mistake_with_a_remedy() -> None:
    for check in (check_reach, check_is_here):
        with pytest.raises(ConfigError, match="the name cannot be resolved") as raised:
            check(HostPort("unknown.invalid", 9400))
        assert raised.value.where == "daemon.listen = unknown.invalid:9400"
        assert "Give an address of this host" in raised.value.mend


@pytest.mark.requires_ipv6
def test_addresses_of_other_hosts_cannot_be_listened_on() -> None:
    for host in ("192.0.2.7", "2001:db8::7"):
        with pytest.raises(ConfigError, match="no interface of this host has it"):
            check_is_here(HostPort(host, 9400))
    for host in ("127.0.0.1", "::1", "::", "0.0.0.0"):
        check_is_here(HostPort(host, 9400))
