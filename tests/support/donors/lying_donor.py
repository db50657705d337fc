# SPDX-License-Identifier: Apache-2.0
"""A donor whose control API is the real one and whose data port lies, for tests of consumers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from infiniswap.control import messages as m
from infiniswap.donor.serve import Donor, serve
from infiniswap.engine.store import StoreConfig
from infiniswap.testing.memory import FakeMemory
from infiniswap.testing.store import FakeStore
from infiniswap.units import GIB
from support.configs import configured
from support.devices import nbd_bytes as nbd

Lie = Callable[["Answer"], None]
"""Answers a request, or breaks the connection (ConnectionError)."""


class Answer:
    """One request, with what the truth would be."""

    def __init__(self, store: LyingStore, client: socket.socket, head: bytes, lease: bytes) -> None:
        magic, _flags, self.command, self.cookie, self.offset, self.length = struct.unpack(
            ">IHHQQI", head
        )
        if magic != nbd.REQUEST_MAGIC:
            raise ConnectionError("not a request")
        self.client = client
        self.pages = store.pages.setdefault(lease, {})
        if self.command == nbd.WRITE:
            data = nbd.receive(client, self.length)
            if store.stores:
                self.pages[self.offset] = data
                for at in range(0, self.length, 4096):
                    self.pages[self.offset + at] = data[at : at + 4096]

    @property
    def data(self) -> bytes:
        """What a READ is to bring."""
        if self.command != nbd.READ:
            return b""
        return b"".join(
            self.pages.get(self.offset + at, bytes(4096)) for at in range(0, self.length, 4096)
        )

    def say(
        self,
        data: bytes | None = None,
        *,
        error: int = 0,
        cookie: int | None = None,
        magic: int = nbd.SIMPLE_REPLY_MAGIC,
    ) -> None:
        """A reply; without arguments the true one."""
        head = struct.pack(">IIQ", magic, error, self.cookie if cookie is None else cookie)
        self.client.sendall(head + ((self.data if data is None else data) if not error else b""))


def truth(answer: Answer) -> None:
    answer.say()


def wrong_cookie(answer: Answer) -> None:
    answer.say(cookie=answer.cookie ^ 0x10001)


def old_cookie(answer: Answer) -> None:
    """Answers everything twice."""
    answer.say()
    answer.say()


def wrong_magic(answer: Answer) -> None:
    answer.say(magic=0x668E33EF)  # of a structured reply


def short_data(answer: Answer) -> None:
    answer.say(answer.data[: len(answer.data) // 2])
    raise ConnectionError("as promised")


def much_data(answer: Answer) -> None:
    answer.say(answer.data + os.urandom(100))


def errors(answer: Answer) -> None:
    answer.say(error=nbd.EIO)


def odd_errors(answer: Answer) -> None:
    answer.say(error=secrets.randbits(32) | 1)


def noise(answer: Answer) -> None:
    answer.say(os.urandom(len(answer.data)))


def zeros(answer: Answer) -> None:
    answer.say(bytes(len(answer.data)))


def anothers_bytes(answer: Answer) -> None:
    """The bytes of another READ: well-framed, and once right."""
    others = [data for at, data in answer.pages.items() if at != answer.offset and len(data) > 0]
    whole = b"".join(others)[: len(answer.data)]
    answer.say(whole.ljust(len(answer.data), b"\0"))


def one_bit(answer: Answer) -> None:
    data = bytearray(answer.data)
    if data:
        data[len(data) // 2] ^= 1
    answer.say(bytes(data))


def late(answer: Answer) -> None:
    time.sleep(1.2)
    answer.say()


def silence(answer: Answer) -> None:
    del answer


def hang_up(answer: Answer) -> None:
    raise ConnectionError("as promised")


LIES: Final[dict[str, Lie]] = {
    lie.__name__: lie
    for lie in (
        wrong_cookie,
        old_cookie,
        wrong_magic,
        short_data,
        much_data,
        errors,
        odd_errors,
        noise,
        zeros,
        anothers_bytes,
        one_bit,
        late,
        silence,
        hang_up,
    )
}


class LyingStore(FakeStore):
    """Slabs as pages in a dict, behind a data port.

    Attributes:
        lie: how requests are answered.
        stores: whether WRITEs are kept.
        counters: connections, requests and maps so far.
    """

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self.lie: Lie = truth
        self.stores = True
        self.pages: dict[bytes, dict[int, bytes]] = {}
        self.counters: Counter[str] = Counter()
        self._server: socketserver.ThreadingTCPServer | None = None
        self._thread: threading.Thread | None = None

    def listen(self, host: str, port: int) -> int:
        """Serves NBD in threads."""
        store = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(60)
                with contextlib.suppress(OSError, struct.error):
                    store._converse(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 64

        self._server = Server((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return int(self._server.server_address[1])

    def map(self, lease: int, slab: int = 0) -> Any:
        """Counted."""
        self.counters["maps"] += 1
        return super().map(lease, slab)

    def close(self) -> None:
        """Ends the data port, too."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
        super().close()

    def _converse(self, client: socket.socket) -> None:
        self.counters["connections"] += 1
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(nbd.GREETING)
        nbd.receive(client, len(nbd.FLAGS))
        _magic, number, length = struct.unpack(">QII", nbd.receive(client, 16))
        payload = nbd.receive(client, length)
        name = payload[4 : 4 + struct.unpack(">I", payload[:4])[0]]
        lease = self._lease_of(name)

        def answer(kind: int, data: bytes = b"") -> None:
            client.sendall(struct.pack(">QIII", nbd.REPLY_MAGIC, number, kind, len(data)) + data)

        if number != nbd.GO or lease is None:
            answer(nbd.ERR_UNKNOWN)
            return
        answer(nbd.INFO_REPLY, struct.pack(">HQH", 0, 1 << 40, 0x16D))
        answer(nbd.INFO_REPLY, struct.pack(">HIII", 3, 1, 4096, 1 << 25))
        answer(nbd.ACK)
        while True:
            request = Answer(self, client, nbd.receive(client, 28), str(lease).encode())
            if request.command == nbd.DISC:
                return
            self.counters["requests"] += 1
            self.lie(request)

    def _lease_of(self, name: bytes) -> int | None:
        with self._lock:
            for number, entry in self._leases.items():
                if name.decode() in entry.tickets.values():
                    return number
        return None


class LyingDonor:
    """A running one; `store.lie` may be changed at any time.

    Attributes:
        floods: whether it sends notices in every session for as long as that lasts.
    """

    def __init__(self, store: LyingStore, address: str, donor: Donor) -> None:
        self.store = store
        self.address = address
        self.floods = False
        self._donor = donor

    async def flood(self) -> None:
        """Until cancelled."""
        while True:
            for session in self._donor.server.sessions if self.floods else ():
                for _ in range(100):
                    await session.channel.notify(m.DrainNotice(draining=False))
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def lying_donor(
    slab_bytes: int, slabs: int, state_dir: Path, secret_file: Path
) -> Iterator[LyingDonor]:
    """Runs a donor in a thread of this process, at first an honest one."""
    config = configured(
        daemon__listen="127.0.0.1:0",
        daemon__data_port=0,
        daemon__slab=slab_bytes,
        daemon__pool=slab_bytes * slabs,
        daemon__headroom="1M",
        daemon__state_dir=state_dir,
        cluster__secret_file=secret_file,
    )
    memory = FakeMemory(GIB)
    made: list[LyingStore] = []
    ready, stop = threading.Event(), threading.Event()
    running: list[LyingDonor] = []

    def factory(store_config: StoreConfig) -> LyingStore:
        made.append(LyingStore(store_config))
        memory.store = made[0]
        return made[0]

    async def run() -> None:
        async with serve(config, factory, memory, stop_s=1.0) as donor:
            running.append(LyingDonor(made[0], f"127.0.0.1:{donor.ports.control_port}", donor))
            flood = asyncio.create_task(running[0].flood())
            ready.set()
            await asyncio.to_thread(stop.wait)
            flood.cancel()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield running[0]
    finally:
        stop.set()
        thread.join()
