# SPDX-License-Identifier: Apache-2.0
"""ublk devices whose servers die: what was accepted is done, by a successor, or said to be lost.

The servers keep their bytes in shared memory (tests/c/ublk_server.c), so that what was answered is
there for the next one; the device's own state is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.devices.ublkservers import (
    SERVER,
    SERVERS,
    WAIT_S,
    Server,
    Succession,
    kill_while,
    nodes,
    prepared,
    run,
    shape_of,
    succession,
    wait_for,
)

from infiniswap.engine.native import NativeEngine
from infiniswap.engine.native_ublk import FailingUblk, ublk_remove
from infiniswap.engine.protocol import EngineConfig
from infiniswap.errors import ConflictError, EngineError, NotFoundError
from infiniswap.units import GIB, MIB, PAGE_BYTES

pytestmark = pytest.mark.usefixtures("ublk_driver", "no_ublk_left")

DISK = Path("/var/tmp")
CONFIG = EngineConfig(size_bytes=64 * MIB, slab_bytes=32 * MIB, staging_pages=64)


@pytest.fixture
def data() -> Iterator[Path]:
    """4 MiB to be written, and found again."""
    path = Path("/dev/shm/ublk-data")
    path.write_bytes(os.urandom(4 * MIB))
    yield path
    path.unlink()


def store(data: Path, path: str) -> None:
    run("dd", f"if={data}", f"of={path}", "bs=256k", "oflag=direct")
    run("blockdev", "--flushbufs", path)


@contextlib.contextmanager
def successor(config: EngineConfig = CONFIG) -> Iterator[NativeEngine]:
    """An engine that could serve the device of another process."""
    backup = DISK / "successor"
    with NativeEngine(config, str(backup)) as engine:
        yield engine
    backup.unlink()


# The servers' rings are held, as by a device's holder: without that Linux 6.12 was seen to panic in
# a kill under load (io_fallback_tw, in the exit of the dead server's queue thread; CVE-2025-37906).
@pytest.mark.full
def test_no_request_fails_and_no_byte_is_lost_when_servers_are_killed(
    count: Callable[[int, int], int],
) -> None:
    with succession(128) as devices:
        job = subprocess.Popen(
            [
                "fio", "--name=kill", f"--filename={devices.path}", "--direct=1",
                "--ioengine=libaio", "--verify=crc32c", "--verify_fatal=1", "--rw=randwrite",
                "--bsrange=4k-256k", "--size=120m", "--iodepth=16", "--loops=100",
                "--verify_backlog=64", "--time_based", "--runtime=600",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        kill_while(job, devices, count(5, 20))
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=WAIT_S)
        assert "err= 0" in output, output
        assert "verify:" not in output, output
        assert re.search(r"\bIO error|Input/output", output) is None, output


def test_a_device_without_a_server_waits_and_can_be_removed() -> None:
    server = Server(64, "new")
    path = f"/dev/ublkb{server.device_id}"
    data = os.urandom(PAGE_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_DSYNC)
    os.pwrite(fd, data, 0)
    server.kill()
    wait_for("the kernel has noticed", lambda: not shape_of(server.device_id).live)
    got: list[object] = []

    def read() -> None:
        try:
            got.append(os.pread(fd, PAGE_BYTES, 32 * MIB))
        except OSError as error:
            got.append(error.errno)

    reader = threading.Thread(target=read)
    reader.start()
    stat = Path(f"/proc/self/task/{reader.native_id}/stat")
    wait_for(
        "the read to wait for a server", lambda: stat.read_text().split(")")[1].split()[0] == "D"
    )
    ublk_remove(server.device_id, SERVERS)
    reader.join(WAIT_S)
    assert got in ([errno.EIO], [b""])  # a device that has ended refuses, or is of no length
    os.close(fd)
    wait_for("the device is gone", lambda: not nodes())


def test_a_successor_that_died_as_it_began_has_a_successor(data: Path) -> None:
    """Linux 6.12 refuses to begin a second time where nothing has been fetched since the first."""
    devices = Succession(64)
    number, path = devices.active.device_id, devices.path
    store(data, path)
    devices.active.kill()
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(subprocess.Popen(["cmp", "-n", str(4 * MIB), data, path]))
        stack.callback(run, SERVER, "-", 0, "remove-by-force", number, check=False)
        stack.callback(devices.standby.kill)
        run(SERVER, "-", 0, "begin", number)
        assert waiting.poll() is None
        devices.standby.ask()
        devices.standby.wait_serving()
        assert waiting.wait(WAIT_S) == 0
        # Once more, and now nobody shall serve it any more.
        devices.standby.kill()
        run(SERVER, "-", 0, "begin", number)
        with FailingUblk(number, SERVERS, 60_000):
            said = run("blkdiscard", "-z", "-l", PAGE_BYTES, path, check=False)
            assert "Input/output error" in said


def test_a_device_that_somebody_has_removed_has_no_successor() -> None:
    devices = Succession(64)
    number = devices.active.device_id
    with successor() as engine:
        frontend = prepared(engine, number, SERVERS)
        devices.active.kill()
        run(SERVER, "-", 0, "remove-by-force", number)
        with pytest.raises(NotFoundError, match=f"no ublk device {number}"):
            frontend.take_over(60_000)
        frontend.close()
    devices.standby.kill()


def test_a_queue_whose_command_is_refused_ends_and_can_be_taken_over(data: Path) -> None:
    with succession(64) as devices:
        store(data, devices.path)
        pid = devices.active.process.pid
        run(SERVER, "-", 0, "break", pid)
        wait_for("its queues to end", lambda: not queues_of(pid))
        with subprocess.Popen(["cmp", "-n", str(4 * MIB), data, devices.path]) as waiting:
            devices.kill()
            assert waiting.wait(WAIT_S) == 0


def queues_of(pid: int) -> list[str]:
    """Names of the threads that serve them."""
    names = [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return [name for name in names if name.startswith("isw-ublk")]


def test_a_living_predecessor_is_not_robbed() -> None:
    server = Server(64, "new")
    with successor() as engine:
        frontend = prepared(engine, server.device_id, SERVERS)
        with pytest.raises(ConflictError, match=f"served by process {server.process.pid}"):
            frontend.take_over(200)
        frontend.close()
    assert shape_of(server.device_id).live
    server.end()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (replace(CONFIG, size_bytes=32 * MIB), "bytes where this device has"),
        (replace(CONFIG, requests_max=16), "requests_max"),
    ],
)
def test_a_device_of_another_shape_is_refused(config: EngineConfig, what: str) -> None:
    server = Server(64, "new")
    with successor(config) as engine, pytest.raises(EngineError, match=what) as caught:
        prepared(engine, server.device_id, SERVERS)
    assert caught.value.code == errno.EINVAL
    server.end()


def test_a_number_that_was_given_again_is_not_taken() -> None:
    first = Server(64, "new")
    standby = Server(64, "standby", first.device_id)
    first.end()
    second = Server(64, "new")
    assert second.device_id == first.device_id
    standby.ask()
    assert standby.process.wait(WAIT_S) == 1
    assert shape_of(second.device_id).live
    standby.close()
    second.end()


def test_lost_swap_space_can_be_taken_out_of_use() -> None:
    """Its pages are gone with the server; what is asked for is that the host goes on without."""
    server = Server(64, "new")
    path = f"/dev/ublkb{server.device_id}"
    run("mkswap", path)
    run("swapon", path)
    server.kill()
    with FailingUblk(server.device_id, SERVERS, 60_000):
        run("swapoff", path)
    assert path not in Path("/proc/swaps").read_text()


def test_large_devices_are_made() -> None:
    server = Server(8 * GIB // MIB, "new")
    assert int(run("blockdev", "--getsize64", f"/dev/ublkb{server.device_id}")) == 8 * GIB
    server.end()
    Path("/dev/shm/ublk-state").unlink()
