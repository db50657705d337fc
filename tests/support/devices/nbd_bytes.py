# SPDX-License-Identifier: Apache-2.0
"""The NBD protocol, byte by byte, for tests that speak it rightly and wrongly."""

from __future__ import annotations

import contextlib
import socket
import struct

GREETING = struct.pack(">QQH", 0x4E42444D41474943, 0x49484156454F5054, 3)
FLAGS = struct.pack(">I", 3)
OPTION_MAGIC = 0x49484156454F5054
REPLY_MAGIC = 0x3E889045565A9
REQUEST_MAGIC = 0x25609513
SIMPLE_REPLY_MAGIC = 0x67446698
EXPORT_NAME, ABORT, LIST, INFO, GO = 1, 2, 3, 6, 7
READ, WRITE, DISC, FLUSH, TRIM, ZEROES = 0, 1, 2, 3, 4, 6
ACK, SERVER, INFO_REPLY = 1, 2, 3
ERR_UNKNOWN = 0x80000006
EIO, EINVAL, ENOSPC = 5, 22, 28


def receive(client: socket.socket, length: int) -> bytes:
    """Exactly that many bytes; fewer at the end of the stream."""
    parts = bytearray()
    with contextlib.suppress(ConnectionError):
        while len(parts) < length and (part := client.recv(length - len(parts))):
            parts += part
    return bytes(parts)


def say(client: socket.socket, data: bytes) -> bool:
    """False: the other end closed before it had heard all of it."""
    with contextlib.suppress(ConnectionError):
        client.sendall(data)
        return True
    return False


def option(number: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """An option, perhaps with a length that is not its own."""
    size = len(payload) if length is None else length
    return struct.pack(">QII", OPTION_MAGIC, number, size) + payload


def go(token: str, infos: int = 0, *, number: int = GO) -> bytes:
    """GO or INFO with a name; `infos` wanted, none of which follow."""
    name = token.encode()
    return option(number, struct.pack(">I", len(name)) + name + struct.pack(">H", infos))


def request(
    command: int,
    offset: int = 0,
    length: int = 0,
    *,
    flags: int = 0,
    cookie: int = 1,
    magic: int = REQUEST_MAGIC,
) -> bytes:
    """The header of a request."""
    return struct.pack(">IHHQQI", magic, flags, command, cookie, offset, length)


def option_reply(client: socket.socket) -> tuple[int, int, bytes]:
    """Option, kind and payload of the next option reply."""
    magic, number, kind, length = struct.unpack(">QIII", receive(client, 20))
    assert magic == REPLY_MAGIC
    return number, kind, receive(client, length)


def negotiate(client: socket.socket, said: bytes) -> int:
    """Says an option; the kind of its last reply: ACK or an error."""
    client.sendall(said)
    while True:
        _, kind, _ = option_reply(client)
        if kind not in (INFO_REPLY, SERVER):
            return kind


def open_export(client: socket.socket, token: str) -> int:
    """Greets and says GO; ACK, or the error."""
    assert receive(client, len(GREETING)) == GREETING
    client.sendall(FLAGS)
    return negotiate(client, go(token))


def reply(client: socket.socket) -> tuple[int, int]:
    """Error and cookie of the next reply."""
    magic, error, cookie = struct.unpack(">IIQ", receive(client, 16))
    assert magic == SIMPLE_REPLY_MAGIC
    return error, cookie


def read(client: socket.socket, offset: int, length: int) -> bytes | int:
    """The bytes, or the error they were refused with."""
    client.sendall(request(READ, offset, length, cookie=offset ^ length))
    error, cookie = reply(client)
    assert cookie == offset ^ length
    return error or receive(client, length)


def write(client: socket.socket, offset: int, data: bytes) -> int:
    """0, or the error it was refused with."""
    client.sendall(request(WRITE, offset, len(data), cookie=3) + data)
    error, cookie = reply(client)
    assert cookie == 3
    return error
