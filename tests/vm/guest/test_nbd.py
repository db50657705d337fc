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
from support.devices.cluster import WAIT_S, run, until
from support.jobs.pagejob import Job, StartJob

from infiniswap.device.frontends import clear_leftovers
from infiniswap.device.frontends.nbd import NbdKernel, find_left
from infiniswap.device.spec.rundir import DevicePaths
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


def test_attached_again_and_again_it_leaves_nothing(
    engine: NativeEngine, paths: DevicePaths, count: Callable[[int, int], int]
) -> None:
    device = NbdKernel(paths)

    def held() -> tuple[int, int, int]:
        ours = Path("/proc/self")
        blocks = [entry for entry in Path("/sys/block").iterdir() if entry.name.startswith("nbd")]
        return len(list((ours / "fd").iterdir())), len(list((ours / "task").iterdir())), len(blocks)

    before = held()
    for _ in range(count(10, 50)):
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


class Servers:
    """nbdfile.py and its children, one at a time. Their file is memory that outlives them."""

    def __init__(self, run_dir: Path, file: Path) -> None:
        program = Path(__file__).with_name("nbdfile.py")
        self._parent = subprocess.Popen(
            [sys.executable, str(program), str(run_dir), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pid = 0

    def start(self, how: str) -> None:
        """Returns when it serves."""
        word, pid, _path = self._ask(how).split()
        assert word == "ready"
        self._pid = int(pid)

    def end(self, number: signal.Signals) -> None:
        """Of the one that serves; returns when it has ended."""
        os.kill(self._pid, number)
        assert self._ask("wait") == f"ended {self._pid}\n"
        self._pid = 0

    def close(self) -> None:
        if self._pid:
            self.end(signal.SIGTERM)
        self._parent.communicate(timeout=WAIT_S)

    def _ask(self, what: str) -> str:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{what}\n")
        self._parent.stdin.flush()
        return self._parent.stdout.readline()


@pytest.fixture
def servers(paths: DevicePaths) -> Iterator[Servers]:
    file = Path("/dev/shm/nbd-file")
    with file.open("wb") as made:
        made.truncate(SIZE)
    servers = Servers(paths.run, file)
    yield servers
    servers.close()
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
def swapping(servers: Servers, paths: DevicePaths) -> Iterator[Servers]:
    """A device that is swap space until whatever swaps there has ended."""
    servers.start("attach")
    ((left, _),) = find_left(paths)
    swap.mkswap(left.path, label="nbd")
    swap.swapon(left.path, priority=10, discard=True, timeout_s=WAIT_S)
    yield servers
    swap.swapoff(left.path, timeout_s=WAIT_S)


def faults(work: Job) -> int:
    """Major ones so far; the job must be alive."""
    assert work.process.poll() is None, work.log
    return parse_key_values((work.cgroup.path / "memory.stat").read_text())["pgmajfault"]


@pytest.mark.full  # test_take_over does the same, and more
def test_a_successor_brings_every_page_back(
    swapping: Servers, job: StartJob, count: Callable[[int, int], int]
) -> None:
    """kill -9 under swap load: programs see a pause, no error and no wrong byte."""
    work = job(0)
    work.reach("filled")
    for _ in range(count(5, 20)):
        swapping.end(signal.SIGKILL)
        swapping.start("take-over")
        before = faults(work)
        until(lambda: faults(work) > before + 100, "page-ins by the successor")  # noqa: B023
    work.finish()  # verifies every page
    assert "I/O error, dev nbd" not in run("dmesg")


def test_what_a_dead_process_left_is_taken_away(
    servers: Servers, paths: DevicePaths, engine: NativeEngine
) -> None:
    """Although nobody has ever opened it."""
    servers.start("attach")
    ((left, _),) = find_left(paths)
    servers.end(signal.SIGKILL)
    holder = os.open(left.path, os.O_RDONLY | os.O_EXCL)  # open, and nobody reads
    with pytest.raises(ConflictError):
        clear_leftovers(paths)
    os.close(holder)
    clear_leftovers(paths)
    assert not nbd.devices()
    device = NbdKernel(paths)
    device.attach(engine)
    device.detach()
