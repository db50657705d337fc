# SPDX-License-Identifier: Apache-2.0
"""The front end nbd on real kernels: block sizes, file systems, swap, processes that die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import WAIT_S, Cluster, Device, run, until
from pagejob import Job, StartJob

from infiniswap.device.frontends.nbd import NbdKernel, find_left
from infiniswap.device.rundir import DevicePaths
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.protocol import EngineConfig
from infiniswap.errors import ConflictError, NotFoundError, SystemCallError
from infiniswap.system import nbd, swap
from infiniswap.system.files import parse_key_values
from infiniswap.system.genl import GenericNetlink
from infiniswap.units import MIB

pytestmark = pytest.mark.kernels("6.12", "6.1")

SIZE = 128 * MIB


@pytest.fixture(autouse=True, scope="module")
def _nbd() -> None:
    run("modprobe", "nbd")


@pytest.fixture(scope="module")
def device(shared_cluster: Cluster) -> Iterator[Device]:
    device = shared_cluster.start("--frontend", "nbd")
    yield device
    assert "Traceback" not in device.log
    assert device.status["stats"]["requests_failed"] == 0


def fio(path: Path, *options: str) -> None:
    run(
        "fio",
        "--name=verify",
        f"--filename={path}",
        "--ioengine=libaio",
        "--direct=1",
        "--iodepth=32",
        "--verify=crc32c",
        "--verify_fatal=1",
        *options,
    )


@pytest.mark.parametrize("block_kib", [4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_fio_verifies_every_block_size(device: Device, block_kib: int) -> None:
    assert device.status["frontend"] == "nbd"
    size_kib = max(4096, 16 * block_kib)
    fio(device.path, "--rw=randwrite", f"--bs={block_kib}k", f"--size={size_kib}k")


def test_a_file_system_under_stress_is_clean(device: Device, tmp_path: Path) -> None:
    run("mkfs.ext4", "-q", "-F", device.path)
    run("mount", "-o", "discard", device.path, tmp_path)
    try:
        fio(
            tmp_path / "file",
            "--rw=randrw",
            "--bssplit=4k/60:32k/30:256k/10",
            "--size=24m",
            "--numjobs=2",
            "--fsync=16",
        )
        for number in range(64):
            (tmp_path / f"small{number}").write_bytes(os.urandom(7_001 * number + 1))
        for number in range(0, 64, 2):
            (tmp_path / f"small{number}").unlink()
        run("fstrim", tmp_path)
    finally:
        run("umount", tmp_path)
    run("e2fsck", "-f", "-n", device.path)


def test_discarded_blocks_are_zeros(device: Device) -> None:
    before = device.status["stats"]
    with device.path.open("r+b", buffering=0) as file:
        file.write(b"\xa5" * MIB)
        os.fsync(file.fileno())
    run("blkdiscard", "-o", "0", "-l", str(MIB), device.path)
    run("blockdev", "--flushbufs", device.path)
    with device.path.open("rb") as file:
        assert file.read(MIB) == bytes(MIB)
    assert device.status["stats"]["trim_requests"] > before["trim_requests"]


def test_a_flush_reaches_the_backup(device: Device) -> None:
    before = device.status["stats"]["flush_requests"]
    with device.path.open("r+b", buffering=0) as file:
        file.write(os.urandom(4096))
        os.fsync(file.fileno())
    assert device.status["stats"]["flush_requests"] > before


def test_the_queue_is_made_for_swap(device: Device) -> None:
    queue = Path("/sys/block", device.path.name, "queue")
    wanted = {
        "rotational": "0",
        "logical_block_size": "4096",
        "max_sectors_kb": "128",
        "discard_granularity": "4096",
        "io_timeout": f"{nbd.REQUEST_TIMEOUT_S * 1000}",
        "write_cache": "write back",
        "fua": "1",
    }
    assert {name: (queue / name).read_text().strip() for name in wanted} == wanted
    assert Path("/dev/infiniswap", device.name).resolve() == device.path


def test_a_device_in_use_is_not_detached(device: Device, tmp_path: Path) -> None:
    run("mkfs.ext4", "-q", "-F", device.path)
    run("mount", device.path, tmp_path)
    refused = device.cluster.cli("device", "stop", device.name)
    assert refused.returncode == ConflictError.exit_code
    assert str(tmp_path) in refused.stderr
    (tmp_path / "still").write_text("here")
    run("umount", tmp_path)
    run("e2fsck", "-f", "-n", device.path)


def test_a_slow_process_loses_connections_and_no_byte(device: Device) -> None:
    """Stopped for longer than the kernel waits: what it has received is sent again."""
    command = ["fio", "--name=v", f"--filename={device.path}", "--ioengine=libaio", "--direct=1"]
    command += ["--iodepth=32", "--rw=randrw", "--bs=4k", "--size=16m", "--verify=crc32c"]
    command += ["--verify_fatal=1", "--loops=2"]
    moved = device.status["stats"]["write_requests"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until(lambda: device.status["stats"]["write_requests"] > moved + 500, "load")
        os.kill(device.pid, signal.SIGSTOP)
        try:
            until(lambda: "timed out" in run("dmesg"), "the kernel's patience to end")
        finally:
            os.kill(device.pid, signal.SIGCONT)
        _, said = process.communicate(timeout=4 * WAIT_S)
    assert process.returncode == 0, said.decode()
    until(lambda: "answers may now take" in device.log, "connections that are replaced")
    status = device.status
    assert status["stats"]["requests_failed"] == 0
    assert not status["alarms"]


# --------------------------------------------------------------- without a cluster


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    backup = Path("/var/tmp/nbd-backup")
    with NativeEngine(EngineConfig(size_bytes=SIZE, slab_bytes=SIZE), str(backup)) as engine:
        yield engine
    backup.unlink()


@pytest.fixture
def paths(tmp_path: Path) -> DevicePaths:
    return DevicePaths(tmp_path.name, tmp_path, tmp_path)


def test_fifty_times_attached_leaves_nothing(engine: NativeEngine, paths: DevicePaths) -> None:
    device = NbdKernel(paths)

    def held() -> tuple[int, int, int]:
        ours = Path("/proc/self")
        blocks = [entry for entry in Path("/sys/block").iterdir() if entry.name.startswith("nbd")]
        return len(list((ours / "fd").iterdir())), len(list((ours / "task").iterdir())), len(blocks)

    before = held()
    for _ in range(50):
        device.attach(engine)
        assert len(find_left(paths)) == 1
        device.detach()
        assert not nbd.devices()
    assert held() == before


def test_a_strangers_device_is_left_alone(engine: NativeEngine, paths: DevicePaths) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, GenericNetlink() as link:
        index = nbd.connect(
            link, [theirs.fileno()], size_bytes=SIZE, identifier="infiniswap:1:/elsewhere"
        )
        try:
            device = NbdKernel(paths)
            with pytest.raises(NotFoundError):
                device.prepare(engine, b"")
            with pytest.raises(SystemCallError):
                nbd.reconnect(link, index, ours.fileno(), identifier="another", timeout_s=5)
            device.attach(engine)
            assert device.block_device != Path(f"/dev/nbd{index}")
            device.detach()
            assert nbd.device(index) is not None
        finally:
            ours.close()
            nbd.disconnect(link, index)
    nbd.wait_free(index, timeout_s=WAIT_S)


def test_a_device_that_is_open_exclusively_stays(engine: NativeEngine, paths: DevicePaths) -> None:
    device = NbdKernel(paths)
    device.attach(engine)
    assert device.block_device is not None
    with device.block_device.open("rb", buffering=0) as file:
        exclusive = os.open(device.block_device, os.O_RDONLY | os.O_EXCL)
        with pytest.raises(ConflictError, match="in use"):
            device.detach()
        assert file.read(4096) == bytes(4096)
        os.close(exclusive)
    device.detach()
    assert not nbd.devices()


# ------------------------------------------------------------------ processes that die


@pytest.fixture
def start(paths: DevicePaths) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts nbdfile.py and waits until it serves. Its file is memory that outlives it."""
    file = Path("/dev/shm/nbd-file")
    with file.open("wb") as made:
        made.truncate(SIZE)
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("nbdfile.py")
        process = subprocess.Popen(
            [sys.executable, str(program), how, str(paths.run), str(file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready /dev/nbd")
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()
    file.unlink()
    assert not nbd.devices()


@pytest.fixture
def job(pagecheck: Path, tmp_path: Path) -> Iterator[StartJob]:
    started: list[Job] = []

    def start(rounds: int) -> Job:
        started.append(Job(pagecheck, tmp_path / "job", rounds))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def swapping(
    start: Callable[[str], subprocess.Popen[str]], paths: DevicePaths
) -> Iterator[subprocess.Popen[str]]:
    """A process whose device is swap space until whatever swaps there has ended."""
    process = start("attach")
    ((left, _),) = find_left(paths)
    swap.mkswap(left.path, label="nbd")
    swap.swapon(left.path, priority=10, discard=True)
    yield process
    swap.swapoff(left.path, timeout_s=WAIT_S)


def faults(work: Job) -> int:
    """Major ones so far; the job must be alive."""
    assert work.process.poll() is None, work.log
    return parse_key_values((work.cgroup.path / "memory.stat").read_text())["pgmajfault"]


def test_a_successor_brings_every_page_back(
    start: Callable[[str], subprocess.Popen[str]],
    swapping: subprocess.Popen[str],
    job: StartJob,
    count: Callable[[int, int], int],
) -> None:
    """kill -9 under swap load: programs see a pause, no error and no wrong byte."""
    process = swapping
    work = job(0)
    work.reach("filled")
    for _ in range(count(5, 20)):
        process.kill()
        process.wait(WAIT_S)
        process = start("adopt")
        before = faults(work)
        until(lambda: faults(work) > before + 100, "page-ins by the successor")  # noqa: B023
    work.more_rounds()
    work.finish()
    assert "I/O error" not in run("dmesg")


def test_what_a_dead_process_left_is_taken_away(
    start: Callable[[str], subprocess.Popen[str]], paths: DevicePaths, engine: NativeEngine
) -> None:
    from infiniswap.device.frontends import clear_leftovers

    process = start("attach")
    ((left, _),) = find_left(paths)
    process.kill()
    process.wait(WAIT_S)
    with left.path.open("rb"):  # open, and nobody reads
        holder = os.open(left.path, os.O_RDONLY | os.O_EXCL)
        with pytest.raises(ConflictError):
            clear_leftovers(paths)
        os.close(holder)
    clear_leftovers(paths)
    assert not nbd.devices()
    device = NbdKernel(paths)
    device.attach(engine)
    device.detach()
