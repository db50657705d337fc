# SPDX-License-Identifier: Apache-2.0
"""A consumer without a line of our C code (pyverbs_peer.py), on soft-RoCE: it finds what the device
wrote and the device what it wrote, and whatever it tries beyond its lease fails, harms nobody and
leaves nothing.

The session is the project's own client; connection parameters go to the other program by a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import SLAB, WAIT_S, Cluster, Donor, run, until
from support.donors.donor_world import KEYS, SECRET
from support.donors.rdma_end import END
from support.machine.softroce import HOST

from infiniswap.control import messages as m
from infiniswap.control.channel import Ended
from infiniswap.control.client import (
    ClientConfig,
    Identity,
    QuietHandler,
    Session,
    connect,
    fetch_status,
    set_draining,
)
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.native_rdma import NativeEngineRdma
from infiniswap.engine.protocol import EngineConfig, FrontendConfig, RemoteConfig
from infiniswap.errors import RequestRefusedError, SessionLostError
from infiniswap.rdma_address import RdmaEnd, RdmaKey
from infiniswap.units import MIB, PAGE_BYTES, HostPort

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.kernels("6.12", "6.1"),  # which can move registrations, and which cannot
    pytest.mark.requires_pyverbs,
    pytest.mark.usefixtures("soft_roce"),
]

CLIENT = ClientConfig(KEYS, connect_s=60, request_s=60, renew_s=60, send_s=60)
PEER = Path(__file__).with_name("pyverbs_peer.py")
ZEROS = bytes(PAGE_BYTES)


class Peer:
    """The other program; its connections have names."""

    def __init__(self, device: str) -> None:
        self.process = subprocess.Popen(
            ["/usr/bin/python3", "-B", str(PEER), device, HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the other program has ended; its standard error says why"
        return json.loads(answer)

    async def ask(self, do: str, **fields: Any) -> Any:
        """Sessions go on meanwhile."""
        return await asyncio.to_thread(self._ask, {"do": do, **fields})

    async def transfer(
        self, do: str, name: str, key: RdmaKey, at: int = 0, data: bytes = b""
    ) -> tuple[str, bytes]:
        """Completion and bytes of a page, or of 8 bytes for an atomic operation."""
        done = await self.ask(
            do,
            name=name,
            address=key.address + at,
            rkey=key.rkey,
            length=8 if "_and_" in do else PAGE_BYTES,
            data=data.hex(),
        )
        return done["status"], bytes.fromhex(done["data"])

    async def read(self, name: str, key: RdmaKey, at: int = 0) -> bytes:
        """A page that can be read."""
        status, data = await self.transfer("read", name, key, at)
        assert status == "SUCCESS"
        return data

    async def write(self, name: str, key: RdmaKey, at: int, data: bytes) -> None:
        """A page that can be written."""
        status, _ = await self.transfer("write", name, key, at, data)
        assert status == "SUCCESS"


class Handler(QuietHandler):
    """Gives slabs back; a stubborn one never does."""

    def __init__(self) -> None:
        self.stubborn = False
        self._ended = asyncio.Event()

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        if self.stubborn:
            await self._ended.wait()

    def ended(self, ended: Ended) -> None:
        self._ended.set()


@dataclass
class Consumer:
    """A session with a lease, and connections of the other program's there."""

    name: str
    peer: Peer
    session: Session
    handler: Handler
    lease: m.LeaseAnswer

    async def connect(self, count: int, *ours: RdmaEnd, mtu_bytes: int = 4096) -> m.RdmaAnswer:
        """Connections NAME0 and so on; behind those to `ours`, which are somebody else's."""
        names = [f"{self.name}{number}" for number in range(count)]
        ends = [
            RdmaEnd(**await self.peer.ask("make", name=name, mtu_bytes=mtu_bytes)) for name in names
        ]
        answer = await self.session.rdma(self.lease.lease, [*ours, *ends])
        for name, end in zip(names, answer.ends[len(ours) :], strict=True):
            fields = {field: getattr(end, field) for field in end.__struct_fields__}
            await self.peer.ask("connect", name=name, end=fields)
        return answer

    async def map(self) -> tuple[m.MapAnswer, RdmaKey]:
        """A slab, and where it is."""
        answer = await self.session.map(self.lease.lease, 0)
        assert answer.key is not None
        return answer, answer.key

    async def close(self, count: int) -> None:
        """The other program's ends."""
        for number in range(count):
            await self.peer.ask("close", name=f"{self.name}{number}")


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory, soft_roce: str) -> Iterator[Donor]:
    """One that asks for a secret, waits long enough for a slow guest and not long for the dead."""
    secret = tmp_path_factory.mktemp("pyverbs") / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    own = Cluster()
    try:
        own.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret)
        own.env["INFINISWAP_DAEMON_DRAIN_MOVE_S"] = "0"
        own.env["INFINISWAP_DAEMON_EVICT_DEADLINE_S"] = "4"
        own.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "1"
        yield own.donor()
    finally:
        own.close()


@pytest.fixture(scope="module")
def peer(soft_roce: str) -> Iterator[Peer]:
    own = Peer(soft_roce)
    try:
        yield own
    finally:
        own.process.kill()
        own.process.communicate()


@contextlib.asynccontextmanager
async def consumer(name: str, donor: Donor, peer: Peer) -> AsyncIterator[Consumer]:
    """With a lease of four slots, given back afterwards."""
    handler = Handler()
    identity = Identity(str(uuid.uuid4()), name, "guest")
    address = HostPort(HOST, donor.control)
    async with await connect(address, identity, CLIENT, handler, slab_bytes=SLAB) as session:
        made = Consumer(name, peer, session, handler, await session.lease(4))
        yield made
        with contextlib.suppress(RequestRefusedError, SessionLostError):
            await session.release(made.lease.lease)


def end_with(**fields: Any) -> RdmaEnd:
    """An end that could be, but for these."""
    return msgspec.structs.replace(END, **fields)


def status(donor: Donor) -> m.Status:
    """Blocking."""
    return asyncio.run(fetch_status(HostPort(HOST, donor.control), CLIENT))


async def counters(donor: Donor) -> dict[str, int]:
    return (await asyncio.to_thread(status, donor)).counters


def held(donor: Donor) -> dict[str, int]:
    """What the kernel has of the donor's on RDMA devices."""
    mark = f" pid {donor.process.pid} "
    kinds = ("qp", "mr", "pd", "cq")
    return {kind: run("rdma", "resource", "show", kind).count(mark) for kind in kinds}


async def nothing_left(donor: Donor) -> None:
    nothing = {"qp": 0, "mr": 0, "pd": 0, "cq": 0}
    await asyncio.to_thread(until, lambda: held(donor) == nothing, "the donor to have let all go")
    now = await counters(donor)
    assert (now["rdma_connections"], now["rdma_regions"]) == (0, 0)


def slab_over_tcp(port: int, ticket: str) -> bytes:
    """All of the slab in slot 0, by the donor's C code."""
    with socket.create_connection((HOST, port), WAIT_S) as client:
        assert nbd.open_export(client, ticket) == nbd.ACK
        parts = [nbd.read(client, at, MIB) for at in range(0, SLAB, MIB)]
    assert all(isinstance(part, bytes) for part in parts)
    return b"".join(part for part in parts if isinstance(part, bytes))


@contextlib.asynccontextmanager
async def device(
    consumer: Consumer, directory: Path
) -> AsyncIterator[tuple[NativeEngine, socket.socket, RdmaKey]]:
    """Our C code with one slab on the consumer's lease by RDMA, beside the other program's "a0",
    which can do smaller packets only; a client of its front end; where the slab is."""
    engine_config = EngineConfig(size_bytes=SLAB, slab_bytes=SLAB, no_backup=True, staging_pages=64)
    engine = NativeEngine(engine_config, None)
    client = socket.socket(socket.AF_UNIX)
    rdma = NativeEngineRdma(engine)
    offer = rdma.offer(HOST, 1, 4)
    try:
        answer = await consumer.connect(1, *offer.ends, mtu_bytes=1024)
        remote = await asyncio.to_thread(
            engine.remote_connect,
            RemoteConfig(
                host=HOST,
                port=consumer.session.welcome.data_port,
                tickets=tuple(await consumer.session.tickets(consumer.lease.lease, 0, 1)),
                export_bytes=consumer.lease.export_bytes,
                queues=1,
                connect_ms_max=60_000,
                request_ms_max=60_000,
                over=offer.answered(answer.ends[:1], answer.probe),
            ),
        )
        mapped, key = await consumer.map()
        rdma.slot_key(remote, mapped.slot, key)
        engine.slab_map(0, remote, mapped.slot, mapped.generation)
        engine.frontend("nbd-socket", FrontendConfig(path=str(directory / "s")))
        client.settimeout(WAIT_S)
        client.connect(str(directory / "s"))
        assert await asyncio.to_thread(nbd.open_export, client, "") == nbd.ACK
        yield engine, client, key
    finally:
        client.close()
        offer.close()
        await asyncio.to_thread(engine.close)


async def test_each_finds_what_the_other_wrote(donor: Donor, peer: Peer, tmp_path: Path) -> None:
    pages = [os.urandom(PAGE_BYTES) for _ in range(4)]
    async with consumer("a", donor, peer) as a, device(a, tmp_path) as (engine, client, key):
        assert await asyncio.to_thread(nbd.write, client, 0, b"".join(pages)) == 0
        for number, page in enumerate(pages):
            assert await peer.read("a0", key, number * PAGE_BYTES) == page

        async def by_device(number: int) -> bytes | int:
            return await asyncio.to_thread(nbd.read, client, number * PAGE_BYTES, PAGE_BYTES)

        # A page that was another one meanwhile, and one that still is: only the first is the
        # page that the device wrote, and it knows.
        foreign = os.urandom(PAGE_BYTES)
        for number in (1, 2):
            await peer.write("a0", key, number * PAGE_BYTES, foreign)
        await peer.write("a0", key, PAGE_BYTES, pages[1])
        before = engine.remotes()[0].totals["rdma_read_pages"]
        assert await by_device(0) == pages[0]
        assert await by_device(1) == pages[1]
        assert engine.remotes()[0].totals["rdma_read_pages"] == before + 2
        assert engine.stats()["crc_errors_remote"] == 0
        assert await by_device(2) == nbd.EIO
        assert engine.stats()["crc_errors_remote"] == 1
        # All of that without the donor's C code; and it sees the same memory.
        now = await counters(donor)
        assert now["read_requests"] == now["write_requests"] == 0
        ticket = await a.session.lasting_ticket(a.lease.lease, 1)
        slab = await asyncio.to_thread(slab_over_tcp, a.session.welcome.data_port, ticket)
        assert slab[: 4 * PAGE_BYTES] == pages[0] + pages[1] + foreign + pages[3]
        assert not any(slab[4 * PAGE_BYTES :])
        await a.close(1)
    await nothing_left(donor)


async def test_nothing_reaches_beyond_a_lease(donor: Donor, peer: Peer) -> None:
    marks = [os.urandom(PAGE_BYTES) for _ in range(2)]
    async with consumer("a", donor, peer) as a, consumer("b", donor, peer) as b:
        await a.connect(1)
        neighbour, theirs = await a.map()
        assert neighbour.slot == 0
        await peer.write("a0", theirs, 0, marks[0])
        await peer.write("a0", theirs, SLAB - PAGE_BYTES, marks[1])
        probe = (await b.connect(16)).probe
        _, mine = await b.map()
        access, invalid, unready = "REM_ACCESS_ERR", "REM_INV_REQ_ERR", "RNR_RETRY_EXC_ERR"
        attacks: Sequence[tuple[str, RdmaKey, int, str]] = [
            # The key is good, but a neighbour's.
            ("read", theirs, 0, access),
            ("write", theirs, 0, access),
            ("read", RdmaKey(theirs.address, mine.rkey), 0, access),
            # Eight bytes before the slab, eight bytes behind it.
            ("read", mine, -8, access),
            ("write", mine, -8, access),
            ("read", mine, SLAB - PAGE_BYTES + 8, access),
            ("write", mine, SLAB - PAGE_BYTES + 8, access),
            # Keys that are none.
            ("read", RdmaKey(mine.address, mine.rkey ^ 1), 0, access),
            ("write", RdmaKey(mine.address, mine.rkey ^ 0x100), 0, access),
            ("write", RdmaKey(mine.address, 0), 0, access),
            # What a connection is not for.
            ("write", probe, 0, access),
            ("fetch_and_add", mine, 0, invalid),
            ("compare_and_swap", mine, 0, invalid),
            ("send", mine, 0, unready),
            ("write_with_imm", mine, 0, unready),
        ]
        seen = []
        for number, (do, key, at, _) in enumerate(attacks):
            status, _data = await peer.transfer(do, f"b{number}", key, at, b"\xee" * PAGE_BYTES)
            seen.append((do, key, at, status))
        assert seen == list(attacks)
        # Each cost its own connection, and nothing else.
        status, _data = await peer.transfer("read", "b0", mine)
        assert status == "WR_FLUSH_ERR"
        assert await peer.read("b15", mine) == ZEROS
        await peer.write("b15", mine, 0, marks[1])
        assert await peer.read("a0", theirs) == marks[0]
        ticket = await a.session.lasting_ticket(a.lease.lease, 1)
        slab = await asyncio.to_thread(slab_over_tcp, a.session.welcome.data_port, ticket)
        assert slab[:PAGE_BYTES] == marks[0]
        assert slab[-PAGE_BYTES:] == marks[1]
        assert not any(slab[PAGE_BYTES:-PAGE_BYTES])
        await a.close(1)
        await b.close(16)
    await nothing_left(donor)


async def test_a_key_dies_with_its_slab(donor: Donor, peer: Peer) -> None:
    address = HostPort(HOST, donor.control)
    mark = secrets.token_bytes(PAGE_BYTES)
    async with consumer("a", donor, peer) as a, consumer("b", donor, peer) as b:
        await a.connect(1)
        await b.connect(4)
        _, stubborn = await a.map()
        given, given_key = await b.map()
        _, evicted = await b.map()
        for name, key in (("a0", stubborn), ("b0", given_key), ("b1", evicted)):
            await peer.write(name, key, 0, mark)
        await b.session.unmap(b.lease.lease, given.slot, given.generation)
        assert (await peer.transfer("write", "b0", given_key))[0] == "REM_ACCESS_ERR"
        # One gives its slab back when it is asked to, the other one has it taken away.
        a.handler.stubborn = True
        assert (await set_draining(address, CLIENT, True)).draining

        def mapped() -> int:
            return sum(lease.slots_mapped for lease in status(donor).leases)

        await asyncio.to_thread(until, lambda: mapped() == 0, "the donor to be empty")
        assert (await peer.transfer("read", "b1", evicted))[0] == "REM_ACCESS_ERR"
        assert (await peer.transfer("write", "a0", stubborn))[0] == "RETRY_EXC_ERR"
        # Whoever has it next finds zeros, and who had it finds nothing.
        await set_draining(address, CLIENT, False)
        _, fresh = await b.map()
        assert await peer.read("b2", fresh) == ZEROS
        assert fresh.rkey not in (stubborn.rkey, given_key.rkey, evicted.rkey)
        await b.session.release(b.lease.lease)
        assert (await peer.transfer("read", "b3", fresh))[0] == "RETRY_EXC_ERR"
        await a.close(1)
        await b.close(4)
    await nothing_left(donor)


@pytest.mark.full
async def test_nonsense_and_silence_are_the_consumers_own(donor: Donor, peer: Peer) -> None:
    nonsense = [
        end_with(number=1 << 24),
        end_with(psn=1 << 24),
        end_with(mtu_bytes=0),
        end_with(reads_max=0),
        end_with(link=1),
        end_with(link=7),
        end_with(gid="00" * 16),
    ]
    async with consumer("a", donor, peer) as a:
        for end in nonsense:  # behind one that is good, and is let go with it
            with pytest.raises(RequestRefusedError) as caught:
                await a.session.rdma(a.lease.lease, [end_with(), end])
            assert caught.value.reason == m.REFUSED_NO_RDMA, end
        assert (await counters(donor))["rdma_connections"] == 0
        await a.connect(1)
        _, key = await a.map()
        async with consumer("b", donor, peer) as b:
            # One connects and says nothing more; a second one is nobody.
            await b.connect(1, end_with(number=0xABCDEF))
            await b.map()
            assert (await counters(donor))["rdma_connections"] == 3
            await peer.write("a0", key, 0, b"\x11" * PAGE_BYTES)
            # Its host dies: no goodbye to the lease, no end of the connections.
            await b.session.close()

            def connections() -> int:
                return status(donor).counters["rdma_connections"]

            await asyncio.to_thread(until, lambda: connections() == 1, "its lease to end")
            with pytest.raises(SessionLostError):
                await b.session.memory()
        assert await peer.read("a0", key) == b"\x11" * PAGE_BYTES
        # The other program dies under a lease that lives.
        peer.process.kill()
        await asyncio.to_thread(peer.process.wait, WAIT_S)
        assert (await a.session.memory()).id > 0
        await a.session.rdma(a.lease.lease, [])
        await a.session.release(a.lease.lease)
    await nothing_left(donor)
    assert "Traceback" not in donor.log
