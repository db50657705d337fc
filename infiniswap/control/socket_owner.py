# SPDX-License-Identifier: Apache-2.0
"""Whom a connection counts for, in every limit: its address (infiniswap.control.peer) or, if it
comes from this host, the user who owns its other end.

A user of this host can connect from any of its addresses, which root's own commands use too. The
kernel says whose socket it is: sock_diag(7), with the formats of <linux/inet_diag.h>.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, Final

from infiniswap.control.peer import THIS_HOST, peer_of, unmapped

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_QUESTION: Final = struct.Struct("=BBBxI2s2s16s16sI8s")
"""Family, protocol, extensions, states; then the socket: ports, addresses, interface, cookie."""
_ANSWER: Final = struct.Struct("=BBxx2s2s16s16sI8sIIIII")
"""Family, state; the socket; expiry, both queues, user, inode."""
_ANY_STATE: Final = 0xFFFF_FFFF
_ANY_COOKIE: Final = b"\xff" * 8
_LISTENS: Final = 10
_ANSWER_BYTES_MAX: Final = 4096

_SocketName = tuple[Any, ...]


def local_user(uid: int) -> str:
    """The peer that all connections of that user of this host count for."""
    return f"user {uid} of this host"


def trusted_users() -> frozenset[str]:
    """Users whom no other one can make strangers: root, and the user of this process."""
    return frozenset({local_user(0), local_user(os.geteuid())})


def peer_of_socket(sock: Any, peer: _SocketName) -> str:
    """Whom an accepted connection counts for.

    Args:
        sock: this end; its family is AF_INET, AF_INET6 or AF_UNIX.
        peer: the name of the other end, as accept(2) gave it; empty on a Unix socket.
    """
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return local_user(struct.unpack("3i", credentials)[1])
    if not peer:
        return ""
    counted = peer_of(peer[0])
    own = sock.getsockname()
    if counted != THIS_HOST and unmapped(own[0]) != unmapped(peer[0]):
        return counted
    uid = _owner(peer, own)
    return counted if uid is None else local_user(uid)


def _owner(peer: _SocketName, own: _SocketName) -> int | None:
    """The user who owns the socket with the name `peer`; None: the kernel does not say."""
    question = _question(peer, own)
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
        ) as link:
            link.sendto(question, (0, 0))
            # The kernel has answered when sendto returns.
            answer = link.recv(_ANSWER_BYTES_MAX, socket.MSG_DONTWAIT)
    except OSError:
        return None
    return _said(answer)


def _question(peer: _SocketName, own: _SocketName) -> bytes:
    family, addresses = _addresses(peer[0], own[0])
    ports = (port.to_bytes(2, "big") for port in (peer[1], own[1]))
    interface = peer[3] if len(peer) > 3 else 0
    body = _QUESTION.pack(
        family, socket.IPPROTO_TCP, 0, _ANY_STATE, *ports, *addresses, interface, _ANY_COOKIE
    )
    size = _HEADER.size + len(body)
    return _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + body


def _addresses(*hosts: str) -> tuple[socket.AddressFamily, list[bytes]]:
    plain = [unmapped(host).partition("%")[0] for host in hosts]
    family = socket.AF_INET6 if ":" in plain[0] else socket.AF_INET
    return family, [socket.inet_pton(family, host) for host in plain]


def _said(answer: bytes) -> int | None:
    """A socket that its owner has closed has no inode, and its user reads as root."""
    if len(answer) < _HEADER.size + _ANSWER.size:
        return None
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    fields = _ANSWER.unpack_from(answer, _HEADER.size)
    state, uid, inode = fields[1], fields[-2], fields[-1]
    return uid if inode and state != _LISTENS else None
