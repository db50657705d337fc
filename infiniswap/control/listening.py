# SPDX-License-Identifier: Apache-2.0
"""The addresses on which this host listens: resolved, judged, and opened in one way.

A name may stand for several addresses, and `::` stands for IPv4 too, whatever asyncio or a sysctl
would make of it. csrc/wire/nbd_listen.c opens the data port by the same rules.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence

from infiniswap.errors import ConfigError, UsageError
from infiniswap.units import ANY_IPV6, HostPort, is_loopback

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_GIVE = "Give an address of this host (`ip -brief address` lists them), or [::] for all of them."


def _resolved(address: HostPort) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Every address of the host, each once. Blocking, unless it is an address itself.

    Raises:
        OSError, UnicodeError: the name cannot be resolved.
    """
    literal = _literal(address)
    if literal is not None:
        return [literal]
    found = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _literal(address: HostPort) -> tuple[socket.AddressFamily, tuple[object, ...]] | None:
    """What an address without a name or a scope stands for: nothing is looked up for it."""
    try:
        parsed = ipaddress.ip_address(address.host)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv4Address):
        return socket.AF_INET, (str(parsed), address.port)
    if parsed.scope_id is not None:
        return None
    return socket.AF_INET6, (str(parsed), address.port, 0, 0)


def open_sockets(address: HostPort) -> list[socket.socket]:
    """Listening sockets on every address of the host. All have one port. Blocking.

    Raises:
        OSError, UnicodeError: no address can be listened on, or one of them is in use.
    """
    made: list[socket.socket] = []
    refused = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    port = address.port
    try:
        for family, where in _resolved(address):
            try:
                made.append(_open(family, (where[0], port, *where[2:])))
            except OSError as error:
                refused = error
                if error.errno not in _NOT_HERE:
                    raise
            else:
                port = made[0].getsockname()[1]
        if not made:
            raise refused
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


def _open(family: socket.AddressFamily, where: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != ANY_IPV6)
        sock.bind(where)
        sock.listen(socket.SOMAXCONN)
    except BaseException:
        sock.close()
        raise
    return sock


def bound_to(sockets: Sequence[socket.socket], port: int | None = None) -> str:
    """The addresses of listening sockets, for people.

    Args:
        sockets: as of open_sockets.
        port: of another service on the same addresses; None: their own.
    """
    names = [sock.getsockname() for sock in sockets]
    found = [str(HostPort(name[0], name[1] if port is None else port)) for name in names]
    both = " (IPv6 and IPv4)" if any(name[0] == ANY_IPV6 for name in names) else ""
    return " and ".join(found) + both


def check_reach(listen: HostPort, key: str = "daemon.listen") -> None:
    """Accepts an address that other hosts reach, and a loopback address given as such. Blocking.

    Raises:
        ConfigError: the name stands for loopback addresses alone, or cannot be resolved.
        UsageError: the same, of a flag.
    """
    if is_loopback(listen.host):
        return
    where = _place(key, listen)
    try:
        found = [str(address[0]) for _, address in _resolved(listen)]
    except (OSError, UnicodeError) as error:
        raise not_resolved(where, error) from error
    if all(map(is_loopback, found)):
        raise _kind(where)(
            f"on this host the name {listen.host} stands for {' and '.join(found)}, which no other "
            "host can reach",
            where=where,
            mend="Give an address of this host in place of the name (`ip -brief address` lists "
            "them), or correct /etc/hosts: Debian enters a host's own name there as 127.0.1.1.",
        )


def check_is_here(listen: HostPort, key: str = "daemon.listen") -> None:
    """Accepts an address of this host. Blocking.

    Raises:
        ConfigError: it is none, or cannot be resolved.
        UsageError: the same, of a flag.
    """
    where = _place(key, listen)
    try:
        for sock in open_sockets(HostPort(listen.host, 0)):
            sock.close()
    except socket.gaierror as error:
        raise not_resolved(where, error) from error
    except OSError as error:
        if error.errno in _NOT_HERE:
            raise _kind(where)(
                "no interface of this host has it", where=where, mend=_GIVE
            ) from None
        raise _kind(where)(f"cannot listen: {error.strerror}", where=where, mend=_GIVE) from error


def _place(key: str, listen: HostPort) -> str:
    return f"{key} {listen}" if key.startswith("--") else f"{key} = {listen}"


def _kind(where: str) -> type[ConfigError] | type[UsageError]:
    """A flag is a mistake of the command line."""
    return UsageError if where.startswith("--") else ConfigError


def not_resolved(where: str, error: OSError | UnicodeError) -> ConfigError | UsageError:
    """The name of an address to listen on is unknown."""
    why = error.strerror if isinstance(error, OSError) else error
    return _kind(where)(f"the name cannot be resolved ({why})", where=where, mend=_GIVE)
