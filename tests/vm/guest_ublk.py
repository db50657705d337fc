# SPDX-License-Identifier: Apache-2.0
"""The ublk front end on a kernel that has it. Run in a virtual machine by tests/vm/test_ublk.py.

The first half has a real engine whose backup is a file; the second half, which kills servers, has
tests/c/ublk_server.c, so that what was answered survives in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniswap.engine.native import NativeEngine
from infiniswap.engine.native_engine import NativeUblk
from infiniswap.engine.native_ublk import ublk_check, ublk_remove, ublk_shape
from infiniswap.engine.protocol import EngineConfig, EventKind
from infiniswap.errors import ConflictError, EngineError, NotFoundError
from infiniswap.units import GIB, KIB, MIB, PAGE_BYTES

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER = ROOT / "build/c/tests/ublk_server"
DISK = Path("/var/tmp")
WAIT_S = 240.0
KILLS = int(os.environ.get("INFINISWAP_VM_KILLS", "5"))
SIZE = 256 * MIB
CONFIG = EngineConfig(size_bytes=SIZE, slab_bytes=64 * MIB, staging_pages=4096)
IO_FLUSHER = 0x80000


def run(*command: object, check: bool = True) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert not check or done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


def wait_for(what: str, condition: object, seconds: float = WAIT_S) -> None:
    end_s = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s, f"after {seconds} s not: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="session", autouse=True)
def driver() -> None:
    run("modprobe", "ublk_drv")
    ublk_check()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not nodes(), "devices are left behind"
    wrong = [line for line in run("dmesg").splitlines() if "WARNING" in line or "BUG:" in line]
    assert not wrong, run("dmesg")[-8000:]


def nodes() -> list[str]:
    return sorted(str(path) for path in Path("/dev").glob("ublk[bc][0-9]*"))


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    backup = DISK / "backup"
    with NativeEngine(CONFIG, str(backup)) as made:
        yield made
    backup.unlink()


@pytest.fixture
def device(engine: NativeEngine) -> Iterator[NativeUblk]:
    frontend = engine.frontend_ublk()
    yield frontend
    frontend.close()


def node(frontend: NativeUblk) -> str:
    return f"/dev/ublkb{frontend.device_id}"


def queue_setting(path: str, name: str) -> str:
    return Path(f"/sys/block/{Path(path).name}/queue/{name}").read_text().strip()


def fio(path: str, name: str, *options: str) -> str:
    return run(
        "fio", f"--name={name}", f"--filename={path}", "--direct=1", "--ioengine=libaio",
        "--verify=crc32c", "--verify_fatal=1", "--group_reporting", *options,
    )  # fmt: skip


# ------------------------------------------------------------------ with an engine


def test_the_kernel_takes_it_for_what_it_is(device: NativeUblk) -> None:
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
    shape = ublk_shape(device.device_id)
    assert shape is not None
    assert shape.live
    assert shape.server_pid == os.getpid()
    assert shape.size_bytes == SIZE
    assert shape.queues * shape.queue_depth <= CONFIG.requests_max


def test_queue_threads_are_io_flushers(device: NativeUblk) -> None:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        if not (task / "comm").read_text().startswith("isw-ublk"):
            continue
        flags = int((task / "stat").read_text().rsplit(")", 1)[1].split()[6])
        assert flags & IO_FLUSHER, (task / "comm").read_text()
        found += 1
    shape = ublk_shape(device.device_id)
    assert shape is not None
    assert found == shape.queues


@pytest.mark.parametrize("block_kib", [4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_what_is_written_is_read(device: NativeUblk, block_kib: int) -> None:
    mib = min(64, max(8, block_kib // 2))
    fio(
        node(device), "verify", "--rw=randwrite", f"--bs={block_kib}k", f"--size={mib}m",
        "--iodepth=16",
    )  # fmt: skip


def test_requests_of_all_sizes_at_once(device: NativeUblk, engine: NativeEngine) -> None:
    fio(
        node(device), "mixed", "--rw=randrw", "--bsrange=4k-1m", "--size=64m", "--iodepth=32",
        "--numjobs=2", "--offset_increment=64m",
    )  # fmt: skip
    assert engine.stats()["requests_failed"] == 0


def test_a_file_system_lives_on_it(device: NativeUblk, tmp_path: Path) -> None:
    path = node(device)
    run("mkfs.ext4", "-q", path)
    run("mount", "-o", "discard", path, tmp_path)
    try:
        fio(
            str(tmp_path / "file"), "stress", "--rw=randrw", "--bs=4k", "--size=16m",
            "--iodepth=8", "--numjobs=2", "--fsync=64",
        )  # fmt: skip
        for number in range(200):
            (tmp_path / f"f{number}").write_bytes(os.urandom(20_000))
        for number in range(0, 200, 2):
            (tmp_path / f"f{number}").unlink()
        run("fstrim", tmp_path)
    finally:
        run("umount", tmp_path)
    run("e2fsck", "-f", "-n", path)


def test_discarded_and_zeroed_pages_are_zeros(device: NativeUblk, engine: NativeEngine) -> None:
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
    device: NativeUblk, engine: NativeEngine
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


def test_forced_unit_access_waits_for_the_backup(device: NativeUblk) -> None:
    buffer = DISK / "fua"
    buffer.write_bytes(os.urandom(64 * KIB))
    run("dd", f"if={buffer}", f"of={node(device)}", "bs=64k", "count=1", "oflag=direct,dsync")
    with (DISK / "backup").open("rb") as backup:
        assert backup.read(64 * KIB) == buffer.read_bytes()
    buffer.unlink()


def test_it_is_made_and_removed_fifty_times(engine: NativeEngine) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threads_now()
    for _ in range(50):
        frontend = engine.frontend_ublk()
        assert nodes()
        frontend.close()
        assert not nodes()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # The kernel ends its own workers for closed rings a moment later.
    wait_for("as many threads as before", lambda: threads_now() <= threads)


def threads_now() -> int:
    return len(os.listdir("/proc/self/task"))


def test_removal_does_not_wait_for_who_has_it_open(engine: NativeEngine) -> None:
    frontend = engine.frontend_ublk()
    fd = os.open(node(frontend), os.O_RDONLY)
    frontend.close()
    with pytest.raises(OSError):
        os.pread(fd, 1, 128 * MIB)
    os.close(fd)
    wait_for("the device is gone", lambda: not nodes())


def test_a_device_taken_away_by_somebody_else_is_reported(engine: NativeEngine) -> None:
    """As an administrator's own tool may do."""
    frontend = engine.frontend_ublk()
    events: list[EventKind] = []

    def down() -> bool:
        events.extend(event.kind for event in engine.events())
        return EventKind.FRONTEND_DOWN in events

    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        ublk_remove(frontend.device_id)
    assert not down()
    run(SERVER, "/dev/shm/x", 1, "remove-by-force", frontend.device_id)
    wait_for("the event", down)
    frontend.close()


def test_what_is_not_there_is_said(engine: NativeEngine) -> None:
    assert ublk_shape(33) is None
    with pytest.raises(NotFoundError):
        ublk_remove(33)
    with pytest.raises(EngineError) as caught:
        engine.frontend_ublk_prepare(33)
    assert caught.value.code == errno.ENODEV


# ---------------------------------------------------------------- servers that die


class Server:
    """ublk_server; its lines are read as they come."""

    def __init__(self, mib: int, *what: object) -> None:
        self.process = subprocess.Popen(
            [str(SERVER), "/dev/shm/ublk-state", str(mib), *map(str, what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline().split()
        assert first, f"exit {self.process.wait()}"
        self.device_id = int(first[1])

    def go(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line == f"serving {self.device_id}\n", line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Succession:
    """A device whose server is killed again and again, each with a standby."""

    def __init__(self, mib: int) -> None:
        self.mib = mib
        Path("/dev/shm/ublk-state").unlink(missing_ok=True)
        self.active = Server(mib, "new")
        self.path = f"/dev/ublkb{self.active.device_id}"
        self.standby = Server(mib, "standby", self.active.device_id)

    def kill(self) -> None:
        self.active.process.send_signal(signal.SIGKILL)
        self.standby.go()  # at once: it waits itself for the predecessor's end
        self.active.process.wait()
        self.active._close()
        self.active = self.standby
        self.standby = Server(self.mib, "standby", self.active.device_id)

    def end(self) -> None:
        self.standby.process.stdin.close()  # type: ignore[union-attr]
        assert self.standby.process.wait(WAIT_S) == 0
        self.active.end()
        Path("/dev/shm/ublk-state").unlink()


@contextlib.contextmanager
def succession(mib: int) -> Iterator[Succession]:
    made = Succession(mib)
    try:
        yield made
    finally:
        made.end()


def kill_while(job: subprocess.Popen[str], devices: Succession, kills: int) -> None:
    """Kills at moments when requests are under way, as far as they are."""
    stat = Path(f"/sys/block/{Path(devices.path).name}/stat")
    for _ in range(kills):
        before = stat.read_text().split()
        wait_for(
            "some I/O since the last kill",
            lambda before=before: stat.read_text().split()[0:5] != before[0:5]
            or job.poll() is not None,
        )
        assert job.poll() is None, f"the job ended early: {job.communicate()[0]}"
        devices.kill()


def test_no_request_fails_and_no_byte_is_lost_when_servers_are_killed() -> None:
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
        kill_while(job, devices, KILLS)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=WAIT_S)
        assert "err= 0" in output, output
        assert "verify:" not in output, output
        assert re.search(r"\bIO error|Input/output", output) is None, output


def test_swap_survives_its_servers_deaths(tmp_path: Path) -> None:
    program = tmp_path / "pagecheck"
    run("cc", "-O2", "-o", program, ROOT / "tests/system/pagecheck.c")
    cgroup = Path("/sys/fs/cgroup/ublk-test")
    with succession(256) as devices:
        run("mkswap", devices.path)
        run("swapon", "-d", "-p", 10, devices.path)
        cgroup.mkdir()
        (cgroup / "memory.max").write_text(str(48 * MIB))

        def enter() -> None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

        job = subprocess.Popen(
            [str(program), "128", "7", "0"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=enter,  # noqa: PLW1509  (this test has no other threads)
        )
        assert job.stdout is not None
        try:
            assert job.stdout.readline() == "filled\n"
            kill_while(job, devices, KILLS)
            assert job.stdout.readline().startswith("round")
            job.terminate()
            output = job.communicate(timeout=WAIT_S)[0]
            assert job.returncode == 0, output
            assert "wrong" not in output
        finally:
            job.kill()
            job.wait()
            run("swapoff", devices.path)
            cgroup.rmdir()


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
    ublk_remove(server.device_id)
    reader.join(WAIT_S)
    assert got == [errno.EIO]
    os.close(fd)
    wait_for("the device is gone", lambda: not nodes())


def shape_of(device_id: int):  # type: ignore[no-untyped-def]
    shape = ublk_shape(device_id)
    assert shape is not None
    return shape


def test_a_living_predecessor_is_not_robbed() -> None:
    config = EngineConfig(size_bytes=64 * MIB, slab_bytes=64 * MIB, staging_pages=64)
    server = Server(64, "new")
    backup = DISK / "successor"
    with NativeEngine(config, str(backup)) as engine:
        frontend = engine.frontend_ublk_prepare(server.device_id)
        with pytest.raises(ConflictError, match=f"served by process {server.process.pid}"):
            frontend.take_over(200)
        frontend.close()
    assert shape_of(server.device_id).live
    backup.unlink()
    server.end()


@pytest.mark.parametrize(
    ("size", "requests", "what"),
    [(32 * MIB, 128, "bytes where this device has"), (64 * MIB, 16, "requests_max")],
)
def test_a_device_of_another_shape_is_refused(size: int, requests: int, what: str) -> None:
    config = EngineConfig(
        size_bytes=size, slab_bytes=32 * MIB, staging_pages=64, requests_max=requests
    )
    server = Server(64, "new")
    backup = DISK / "successor"
    with NativeEngine(config, str(backup)) as engine:
        with pytest.raises(EngineError, match=what) as caught:
            engine.frontend_ublk_prepare(server.device_id)
        assert caught.value.code == errno.EINVAL
    backup.unlink()
    server.end()


def test_a_number_that_was_given_again_is_not_taken() -> None:
    first = Server(64, "new")
    standby = Server(64, "standby", first.device_id)
    first.end()
    second = Server(64, "new")
    assert second.device_id == first.device_id
    assert standby.process.stdin is not None
    standby.process.stdin.write("go\n")
    standby.process.stdin.flush()
    assert standby.process.wait(WAIT_S) == 1
    assert shape_of(second.device_id).live
    standby._close()
    second.end()


def test_large_devices_are_made() -> None:
    server = Server(8 * GIB // MIB, "new")
    assert int(run("blockdev", "--getsize64", f"/dev/ublkb{server.device_id}")) == 8 * GIB
    server.end()
    Path("/dev/shm/ublk-state").unlink()
