# SPDX-License-Identifier: Apache-2.0
"""After start the page path allocates nothing: counted in running processes, donor and device.

What the C library's threads allocate is counted by a preloaded library (count_allocations.c),
while tens of thousands of pages are written and read. It must be nothing at all: an allocation
per page would wait, when memory is short, for the page-out that it is part of.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import PROGRAM, SLAB, WAIT_S, Cluster, Device, until
from support.devices.nbd_bytes import ACK, DISC, READ, WRITE, open_export, receive, reply, request

from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_tool("cc"),
    pytest.mark.timeout(900),  # page by page, by this process
]

SIZE = 32 * MIB
PAGE = 4096
PAGES = SIZE // PAGE
ROUNDS = 2
"""Times that every page is written, and read, while being counted."""
DEPTH = 16

_HEAD = struct.Struct("5Q")
_KEPT = struct.Struct("16sQ104s")


class Counted:
    """One process's counts."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), 0)

    def close(self) -> None:
        self._memory.close()
        self._file.close()

    def arm(self) -> None:
        """From now on callers are kept."""
        struct.pack_into("Q", self._memory, 24, 1)

    @property
    def ours(self) -> int:
        """Allocations and mappings of the C library's threads."""
        allocations, maps, *_ = _HEAD.unpack_from(self._memory)
        return int(allocations + maps)

    @property
    def others(self) -> int:
        return int(_HEAD.unpack_from(self._memory)[2])

    @property
    def kept(self) -> str:
        lines = []
        for at in range(min(_HEAD.unpack_from(self._memory)[4], 32)):
            thread, caller, where = _KEPT.unpack_from(self._memory, _HEAD.size + at * _KEPT.size)
            name, where = thread.split(b"\0")[0].decode(), where.split(b"\0")[0].decode()
            lines.append(f"{name}: {where} +{caller:#x}")
        return "\n".join(lines)


def preloading(directory: Path, library: Path) -> Path:
    """A virtual environment like ours, whose interpreter loads a library first: of the environment
    of what starts it a device has nothing."""
    (directory / "bin").mkdir(parents=True)
    for name in ("lib", "pyvenv.cfg"):
        (directory / name).symlink_to(Path(sys.prefix) / name)
    python = directory / "bin" / "python"
    python.write_text(
        f'#!/bin/bash\nLD_PRELOAD={library} exec -a "$0" {os.path.realpath(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def counting(cluster: Cluster) -> Iterator[Callable[[int], Counted]]:
    """Every process started from here on is counted; gives the counts of one by its pid."""
    library, directory = cluster.root / "count.so", cluster.root / "allocations"
    directory.mkdir()
    source = Path(__file__).parent / "count_allocations.c"
    options = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-fno-builtin"]
    built = subprocess.run(
        ["cc", *options, str(source), "-o", str(library), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"needs glibc ({built.stderr[-200:]})")
    # A connection that is made anew while it is counted would be allocated: nobody is given up.
    cluster.env["INFINISWAP_DEVICE_REQUEST_MS"] = "60000"
    cluster.env["INFINISWAP_CLUSTER_HEARTBEATS_MISSED_MAX"] = "100"
    cluster.program = (str(preloading(cluster.root / "python", library)), *PROGRAM[1:])
    cluster.env["INFINISWAP_TEST_ALLOCATIONS"] = str(directory)
    opened: list[Counted] = []

    def of(pid: int) -> Counted:
        opened.append(Counted(directory / str(pid)))
        return opened[-1]

    yield of
    for counted in opened:
        counted.close()


def assert_nothing_allocated(
    cluster: Cluster,
    device: Device,
    counting: Callable[[int], Counted],
    warm_up: Callable[[], None],
    load: Callable[[], None],
) -> None:
    processes = {
        "device": counting(device.pid),
        **{f"donor {n}": counting(d.process.pid) for n, d in enumerate(cluster.donors)},
    }

    def all_mapped() -> bool:
        warm_up()
        return bool(device.status["slabs"]["mapped"] == SIZE // SLAB)

    until(all_mapped, "every slab on a donor", 5 * WAIT_S)
    warm_up()
    stats = device.status["stats"]
    for name, counted in processes.items():
        assert counted.others > 100, "the counting library is not there"
        # A connection is allocated on its own thread: so threads are told apart.
        assert name == "device" or counted.ours > 0, f"{name} has no thread that is counted"
        counted.arm()

    def made_by_load() -> dict[str, int]:
        before = {name: counted.ours for name, counted in processes.items()}
        load()
        return {name: counted.ours - before[name] for name, counted in processes.items()}

    made = made_by_load()
    kept = [line for counted in processes.values() for line in counted.kept.splitlines()]
    if kept and all("libfuse3" in line for line in kept):
        made = made_by_load()  # a single request that is no page, such as statfs, is libfuse's
    for name, counted in processes.items():
        assert made[name] == 0, (
            f"{name}: {made[name]} allocations, the first of them:\n{counted.kept}"
        )
    # Both ways were used: pages were written to and read from donors, and went to the backup.
    after = device.status["stats"]
    pages = PAGES * ROUNDS
    assert after["pages_out"] - stats["pages_out"] >= pages
    assert after["pages_out_remote"] - stats["pages_out_remote"] >= pages // 2
    assert after["pages_out_backup"] - stats["pages_out_backup"] > 0
    # Where the processors are busy the disk may be the quicker source of most of them.
    read = {name: after[name] - stats[name] for name in ("pages_in_remote", "fallback_quicker")}
    assert read["pages_in_remote"] > 0
    assert sum(read.values()) >= pages // 2


def shuffled(seed: int) -> list[int]:
    pages = list(range(PAGES))
    random.Random(seed).shuffle(pages)
    return pages


# ------------------------------------------------------------------------------ a socket


def ask(client: socket.socket, command: int, pages: list[int], data: bytes) -> None:
    """Many requests, DEPTH at once."""
    places = threading.Semaphore(DEPTH)

    def listen() -> None:
        for _ in pages:
            error, cookie = reply(client)
            assert error == 0
            if command == READ:
                assert receive(client, PAGE)[8:] == data[8:], cookie
            places.release()

    listener = threading.Thread(target=listen)
    listener.start()
    for page in pages:
        assert places.acquire(timeout=WAIT_S)
        payload = struct.pack("Q", page) + data[8:] if command == WRITE else b""
        client.sendall(request(command, page * PAGE, PAGE, cookie=page) + payload)
    listener.join(WAIT_S)
    assert not listener.is_alive()


def test_pages_over_a_socket(cluster: Cluster, counting: Callable[[int], Counted]) -> None:
    cluster.donor()
    cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    data = os.urandom(PAGE)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(str(device.run / "nbd.sock"))
        assert open_export(client, "") == ACK

        def warm_up() -> None:
            ask(client, WRITE, shuffled(0), data)
            ask(client, READ, shuffled(1), data)

        def load() -> None:
            for seed in range(ROUNDS):
                ask(client, WRITE, shuffled(seed), data)
                ask(client, READ, shuffled(seed + 10), data)

        assert_nothing_allocated(cluster, device, counting, warm_up, load)
        client.sendall(request(DISC))


# ---------------------------------------------------------------------- a block device


@pytest.mark.requires_root
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
def test_pages_of_a_block_device(cluster: Cluster, counting: Callable[[int], Counted]) -> None:
    cluster.donor()
    cluster.donor()
    device = cluster.start(size=str(SIZE))
    buffer = mmap.mmap(-1, PAGE)  # aligned, as direct I/O wants it
    data = os.urandom(PAGE)
    disk = os.open(device.path, os.O_RDWR | os.O_DIRECT)
    try:

        def write_all(seed: int) -> None:
            buffer[:] = data
            for page in shuffled(seed):
                assert os.pwritev(disk, [buffer], page * PAGE) == PAGE

        def read_all(seed: int) -> None:
            for page in shuffled(seed):
                assert os.preadv(disk, [buffer], page * PAGE) == PAGE
                assert buffer[:] == data

        def warm_up() -> None:
            write_all(0)
            read_all(1)

        def load() -> None:
            for seed in range(ROUNDS):
                write_all(seed)
                read_all(seed + 10)

        assert_nothing_allocated(cluster, device, counting, warm_up, load)
    finally:
        os.close(disk)
        buffer.close()
