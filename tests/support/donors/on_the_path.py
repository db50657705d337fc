# SPDX-License-Identifier: Apache-2.0
"""Somebody on the path between a device and a real donor, who forwards what both say."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from support.devices import nbd_bytes as nbd
from support.devices.cluster import WAIT_S, Donor


class OnThePath:
    """Forwards a donor's control port and its data port, and uses tickets before their owner does.

    Attributes:
        steals: how many tickets it still uses itself.
        stolen: its own connections to the donor.
        tickets: that it has seen.
    """

    def __init__(self, donor: Donor, host: str = "127.0.0.2") -> None:
        self.host = host
        self.steals = 0
        self.stolen: list[socket.socket] = []
        self.tickets: list[str] = []
        self._donor = donor
        self._forwarded: list[socket.socket] = []  # to the data port, both sides
        self._threads: list[threading.Thread] = []
        # Devices dial data connections at the port that the donor has said.
        self._listeners = [
            socket.create_server((self.host, 0)),
            socket.create_server((self.host, donor.data)),
        ]
        self.address = f"{self.host}:{self._listeners[0].getsockname()[1]}"
        for listener, port in zip(self._listeners, (donor.control, donor.data), strict=True):
            self._start(self._serve, listener, port)

    def close(self) -> None:
        for each in (*self._listeners, *self._forwarded, *self.stolen):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in (*self._listeners, *self._forwarded, *self.stolen):
            each.close()

    def cut(self) -> None:
        """Ends every connection that it forwards."""
        for each in self._forwarded:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def steal(self, ticket: str) -> bool:
        """Opens a connection with it; whether the donor lets us."""
        mine = socket.create_connection(("127.0.0.1", self._donor.data), WAIT_S)
        self.stolen.append(mine)
        return nbd.open_export(mine, ticket) == nbd.ACK

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()

    def _serve(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                donor = socket.create_connection(("127.0.0.1", port), WAIT_S)
                self._forwarded += [client, donor]
                self._start(self._forward, client, donor, port)

    def _forward(self, client: socket.socket, donor: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError, struct.error):
            if port == self._donor.data:
                self._read_ticket(client, donor)
            donor.settimeout(None)
            if port == self._donor.data:
                self._converse(client, donor)
            else:
                self._start(self._pump, donor, client)
                self._pump(client, donor)

    def _converse(self, client: socket.socket, donor: socket.socket) -> None:
        """What is said on a data connection after its ticket, until it ends."""
        self._start(self._pump, donor, client)
        self._pump(client, donor)

    def _read_ticket(self, client: socket.socket, donor: socket.socket) -> None:
        client.sendall(nbd.receive(donor, len(nbd.GREETING)))
        said = nbd.receive(client, len(nbd.FLAGS) + 16)
        payload = nbd.receive(client, struct.unpack(">I", said[-4:])[0])
        self.tickets.append(payload[4:36].decode())
        if self.steals:
            self.steals -= 1
            assert self.steal(self.tickets[-1])
        donor.sendall(said + payload)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
