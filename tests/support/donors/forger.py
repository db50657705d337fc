# SPDX-License-Identifier: Apache-2.0
"""Somebody on the path who puts other pages into a real donor's replies."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

from infiniswap.units import PAGE_BYTES
from support.devices import nbd_bytes as nbd
from support.donors.checksum import with_crc_of
from support.donors.on_the_path import OnThePath


class Forger(OnThePath):
    """Each page that it puts in has the CRC-32C of the right one: only a seal tells them apart.

    Attributes:
        forge: makes a page of a reply from its place at the donor and what the donor has said;
            None: nothing is altered.
        versions: what was written to each place of the donor, the newest last.
        forged: how many pages were altered.
    """

    forge: Callable[[Forger, int, bytes], bytes] | None = None

    def __init__(self, *args: object) -> None:
        self.versions: dict[int, list[bytes]] = {}
        self.forged = 0
        super().__init__(*args)  # type: ignore[arg-type]

    def _converse(self, client: socket.socket, donor: socket.socket) -> None:
        asked: dict[int, tuple[int, int]] = {}
        self._start(self._replies, donor, client, asked)
        with contextlib.suppress(OSError, struct.error):
            while len(head := nbd.receive(client, 28)) == 28:
                _, _, command, cookie, offset, length = struct.unpack(">IHHQQI", head)
                data = nbd.receive(client, length) if command == nbd.WRITE else b""
                for at in range(0, len(data), PAGE_BYTES):
                    self.versions.setdefault(offset + at, []).append(data[at : at + PAGE_BYTES])
                if command == nbd.READ:
                    asked[cookie] = offset, length
                donor.sendall(head + data)
        with contextlib.suppress(OSError):
            donor.shutdown(socket.SHUT_WR)

    def _replies(
        self, donor: socket.socket, client: socket.socket, asked: dict[int, tuple[int, int]]
    ) -> None:
        with contextlib.suppress(OSError, struct.error):
            kind = nbd.INFO_REPLY
            while kind == nbd.INFO_REPLY:
                head = nbd.receive(donor, 20)
                _, _, kind, length = struct.unpack(">QIII", head)
                client.sendall(head + nbd.receive(donor, length))
            while len(head := nbd.receive(donor, 16)) == 16:
                _, error, cookie = struct.unpack(">IIQ", head)
                offset, length = asked.pop(cookie, (0, 0))
                data = b"" if error else nbd.receive(donor, length)
                pages = [
                    self._page(offset + at, data[at : at + PAGE_BYTES])
                    for at in range(0, len(data), PAGE_BYTES)
                ]
                client.sendall(head + b"".join(pages))
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)

    def _page(self, offset: int, right: bytes) -> bytes:
        if self.forge is None:
            return right
        self.forged += 1
        return with_crc_of(self.forge(self, offset, right), right)


def flipped(forger: Forger, offset: int, right: bytes) -> bytes:
    """One bit."""
    del forger, offset
    return bytes([right[0] ^ 1]) + right[1:]


def swapped(forger: Forger, offset: int, right: bytes) -> bytes:
    """The newest version of its neighbour."""
    del right
    return forger.versions[offset ^ PAGE_BYTES][-1]


def rolled_back(forger: Forger, offset: int, right: bytes) -> bytes:
    """The version before."""
    return next(page for page in reversed(forger.versions[offset]) if page != right)


def of_another_device(other: Forger) -> Callable[[Forger, int, bytes], bytes]:
    """What another device has in the same place of its lease."""

    def anothers(forger: Forger, offset: int, right: bytes) -> bytes:
        del forger, right
        return other.versions[offset][-1]

    return anothers
