# SPDX-License-Identifier: Apache-2.0
"""The ublk front end over a real engine whose backup is a file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.ublkservers import SERVER, Server, nodes, prepared, run, wait_for
from support.jobs.fiojob import VERIFY, fio, stress_a_file_system, verify_every_block_size
from support.machine.runmode import FULL

from infiniswap.engine.native import NativeEngine
from infiniswap.engine.native_frontend import NativeFrontend
from infiniswap.engine.native_ublk import ublk_check, ublk_remove, ublk_shape
from infiniswap.engine.protocol import EngineConfig, EventKind, FrontendConfig
from infiniswap.errors import (
    ConflictError,
    EngineError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)
from infiniswap.units import KIB, MIB

pytestmark = pytest.mark.usefixtures("ublk_driver", "no_ublk_left")

DISK = Path("/var/tmp")
SIZE = 256 * MIB
CONFIG = EngineConfig(size_bytes=SIZE, slab_bytes=64 * MIB, staging_pages=4096)
IO_FLUSHER = 0x80000
IDENTITY = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    backup = DISK / "backup"
    with NativeEngine(CONFIG, str(backup)) as made:
        yield made
    backup.unlink()


@pytest.fixture
def device(engine: NativeEngine) -> Iterator[NativeFrontend]:
    frontend = engine.frontend("ublk", FrontendConfig(identity=IDENTITY))
    yield frontend
    frontend.close()


def node(frontend: NativeFrontend) -> Path:
    return Path(f"/dev/ublkb{frontend.info().device_id}")


def queue_setting(path: Path, name: str) -> str:
    return Path(f"/sys/block/{path.name}/queue/{name}").read_text().strip()


def test_the_kernel_takes_it_for_what_it_is(device: NativeFrontend) -> None:
    path = node(device)
    wanted = {
        "rotational": "0",
        "logical_block_size": "4096",
        "physical_block_size": "4096",
        "discard_granularity": "4096",
        "write_cache": "write back",
        "fua": "1",
        "max_sectors_kb": "256",
    }
    assert {name: queue_setting(path, name) for name in wanted} == wanted
    assert int(queue_setting(path, "discard_max_bytes")) >= MIB
    assert int(queue_setting(path, "write_zeroes_max_bytes")) >= MIB
    assert int(run("blockdev", "--getsize64", path)) == SIZE
    shape = ublk_shape(device.info().device_id)
    assert shape is not None
    assert shape.live
    assert shape.server_pid == os.getpid()
    assert shape.size_bytes == SIZE
    assert shape.identity == IDENTITY
    assert shape.queues * shape.queue_depth <= CONFIG.requests_max


def test_queue_threads_are_io_flushers(device: NativeFrontend) -> None:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        if not (task / "comm").read_text().startswith("isw-ublk"):
            continue
        flags = int((task / "stat").read_text().rsplit(")", 1)[1].split()[6])
        assert flags & IO_FLUSHER, (task / "comm").read_text()
        found += 1
    shape = ublk_shape(device.info().device_id)
    assert shape is not None
    assert found == shape.queues


def test_what_is_written_is_read(device: NativeFrontend) -> None:
    """In blocks of every size."""
    verify_every_block_size(node(device))


def test_requests_of_all_sizes_at_once(device: NativeFrontend, engine: NativeEngine) -> None:
    size = "64m" if FULL else "16m"
    both = ("--iodepth=32", "--numjobs=2", f"--offset_increment={size}", f"--size={size}")
    fio(node(device), "--rw=randrw", "--bsrange=4k-1m", *both, *VERIFY)
    assert engine.stats()["requests_failed"] == 0


def test_a_file_system_lives_on_it(device: NativeFrontend, tmp_path: Path) -> None:
    stress_a_file_system(node(device), tmp_path)


def test_discarded_and_zeroed_pages_are_zeros(device: NativeFrontend, engine: NativeEngine) -> None:
    path = node(device)
    run("dd", "if=/dev/urandom", f"of={path}", "bs=1M", "count=16", "oflag=direct")
    run("blkdiscard", "-o", 0, "-l", 4 * MIB, path)
    run("blkdiscard", "--zeroout", "-o", 4 * MIB, "-l", 4 * MIB, path)
    run("cmp", "-n", 8 * MIB, path, "/dev/zero")
    assert "differ" in run("cmp", "-n", 12 * MIB, path, "/dev/zero", check=False)
    stats = engine.stats()
    assert stats["trim_requests"] >= 1
    assert stats["zero_requests"] >= 1


def written(fd: int, offset: int, seed: int) -> bytes:
    data = seed.to_bytes(8, "little") * (64 * KIB // 8)
    assert os.pwrite(fd, data, offset) == len(data)
    return data


def test_after_a_flush_the_bytes_are_on_the_backup(
    device: NativeFrontend, engine: NativeEngine
) -> None:
    fd = os.open(node(device), os.O_RDWR)
    try:
        data = written(fd, 8 * MIB, 7)
        os.fsync(fd)
    finally:
        os.close(fd)
    assert engine.stats()["flush_requests"] >= 1
    with (DISK / "backup").open("rb") as backup:
        backup.seek(8 * MIB)
        assert backup.read(len(data)) == data


def test_forced_unit_access_waits_for_the_backup(device: NativeFrontend) -> None:
    buffer = DISK / "fua"
    buffer.write_bytes(os.urandom(64 * KIB))
    run("dd", f"if={buffer}", f"of={node(device)}", "bs=64k", "count=1", "oflag=direct,dsync")
    with (DISK / "backup").open("rb") as backup:
        assert backup.read(64 * KIB) == buffer.read_bytes()
    buffer.unlink()


def test_it_is_made_and_removed_again_and_again(
    engine: NativeEngine, count: Callable[[int, int], int]
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threads_now()
    for _ in range(count(10, 50)):
        frontend = engine.frontend("ublk", FrontendConfig(identity=IDENTITY))
        assert nodes()
        frontend.close()
        assert not nodes()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # The kernel ends its own workers for closed rings a moment later.
    wait_for("as many threads as before", lambda: threads_now() <= threads)


def threads_now() -> int:
    return len(os.listdir("/proc/self/task"))


def is_readable(fd: int) -> bool:
    """A device that has ended is of no length, or refuses."""
    try:
        return bool(os.pread(fd, 1, 128 * MIB))
    except OSError:
        return False


def test_removal_does_not_wait_for_who_has_it_open(engine: NativeEngine) -> None:
    frontend = engine.frontend("ublk", FrontendConfig(identity=IDENTITY))
    fd = os.open(node(frontend), os.O_RDONLY)
    frontend.close()
    assert not is_readable(fd)
    os.close(fd)
    wait_for("the device is gone", lambda: not nodes())


def test_a_device_taken_away_by_somebody_else_is_reported(engine: NativeEngine) -> None:
    """As an administrator's own tool may do."""
    frontend = engine.frontend("ublk", FrontendConfig(identity=IDENTITY))
    events: list[EventKind] = []

    def down() -> bool:
        events.extend(event.kind for event in engine.events())
        return EventKind.FRONTEND_DOWN in events

    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        ublk_remove(frontend.info().device_id, IDENTITY)
    assert not down()
    run(SERVER, "/dev/shm/x", 1, "remove-by-force", frontend.info().device_id)
    wait_for("the event", down)
    frontend.close()


def test_what_is_not_there_is_said(engine: NativeEngine) -> None:
    assert ublk_shape(33) is None
    with pytest.raises(NotFoundError):
        ublk_remove(33, IDENTITY)
    with pytest.raises(EngineError) as caught:
        prepared(engine, 33, IDENTITY)
    assert caught.value.code == errno.ENODEV


@contextlib.contextmanager
def setting(path: str, value: int) -> Iterator[None]:
    """A number that the kernel has, for a while."""
    before = Path(path).read_text()
    Path(path).write_text(str(value))
    try:
        yield
    finally:
        Path(path).write_text(before)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_the_kernel_refuses_is_said() -> None:
    """tests/c/test_ublk_refused.c has all of it; these are answers of a real one."""
    with nobody(), pytest.raises(NotPermittedError, match="need root: /dev/ublk-control"):
        ublk_check()
    off = setting("/proc/sys/kernel/io_uring_disabled", 2)
    with off, pytest.raises(UnavailableError, match="io_uring, which is switched off here"):
        ublk_check()
    ublk_check()


def test_a_strangers_device_is_left_alone(engine: NativeEngine) -> None:
    server = Server(SIZE // MIB, "new")
    for attempt in (
        lambda: prepared(engine, server.device_id, IDENTITY),
        lambda: ublk_remove(server.device_id, IDENTITY),
    ):
        with pytest.raises(EngineError) as caught:
            attempt()
        assert caught.value.code == errno.ESTALE
    server.end()
