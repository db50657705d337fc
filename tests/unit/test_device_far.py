# SPDX-License-Identifier: Apache-2.0
"""Far memory of a device: its jobs, what the holder keeps, a take-over, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import pytest
from support.devices.holder_pair import Pair, said
from support.machine.virtual_time import in_virtual_time

from infiniswap.device.api import FarRow
from infiniswap.device.control import far_client
from infiniswap.device.control.client import DeviceError
from infiniswap.device.process import far
from infiniswap.device.process.far import FarMemory, take_kept
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.protocol import Engine, FarTold, FrontendConfig, FrontendInfo
from infiniswap.errors import ConflictError, EngineError
from infiniswap.units import MIB

T = TypeVar("T")


class FrontEnd:
    """Takes jobs; the test says how many processes have far memory."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.processes = 0
        self.closed = False
        self.refusals = 0

    def info(self) -> FrontendInfo:
        """What the test says."""
        return FrontendInfo(
            size_bytes=64 * MIB,
            requests_max=8,
            connections=self.processes,
            used_bytes=self.processes * 2 * MIB,
            far=FarTold(pages_out=7 * self.processes, back_fork=self.processes),
        )

    def serve(self, descriptor: int) -> None:
        """One more job."""
        if self.refusals:
            self.refusals -= 1
            raise EngineError("the job's socket cannot be served: too many", code=24)
        self.served.append(os.fstat(descriptor).st_ino)

    def close(self) -> None:
        """The end."""
        self.closed = True


class FakeEngine:
    """Makes that front end, after a number of failures."""

    def __init__(self, failures: int = 0) -> None:
        self.front_end = FrontEnd()
        self.failures = failures
        self.tables: list[int] = []

    def frontend(self, kind: str, config: FrontendConfig) -> FrontEnd:
        """Sizes the table, as the front end does."""
        assert kind == "far"
        if self.failures:
            self.failures -= 1
            raise EngineError("no memory for the table of far memory", code=12)
        self.tables.append(os.fstat(config.table_fd).st_ino)
        os.ftruncate(config.table_fd, 4096)
        return self.front_end


class World:
    """Far memory of a device with a holder."""

    def __init__(self, run: Path, pair: Pair, engine: FakeEngine | None = None) -> None:
        self.paths = DevicePaths("d", run, run)
        self.holder, self._theirs = pair
        self.engine = engine or FakeEngine()
        self.delay_s = 0.0  # of whatever blocks
        self.far = FarMemory(64 * MIB, self.paths, self.holder, self.blocking)
        self.kept: dict[str, int] = {}
        self.alarms = Alarms()

    @property
    def row(self) -> FarRow:
        row = self.far.row()
        assert row is not None
        return row

    @property
    def front_end(self) -> FrontEnd:
        return self.engine.front_end

    async def blocking(self, call: Callable[[], T]) -> T:
        await asyncio.sleep(self.delay_s)
        return call()

    async def start(self) -> None:
        await self.far.start(cast(Engine, self.engine))
        self.hear()

    def hear(self) -> list[str]:
        """What the holder was told since the last time; it keeps what it has to keep."""
        heard = []
        self._theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                text, descriptors = said(self._theirs)
                word, _, name = text.partition(" ")
                heard.append(text)
                if name in self.kept:
                    os.close(self.kept.pop(name))
                if word == "keep":
                    (self.kept[name],) = descriptors
        return heard

    async def connect(self) -> socket.socket:
        return await asyncio.to_thread(far_client.connect, self.paths)

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not is_so():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.far.close()
        for fd in self.kept.values():
            os.close(fd)


@contextlib.asynccontextmanager
async def started(run: Path, pair: Pair) -> AsyncIterator[World]:
    world = World(run, pair)
    await world.start()
    yield world
    await world.close()


async def test_a_start_keeps_table_and_socket(tmp_path: Path, holder_pair: Pair) -> None:
    async with started(tmp_path, holder_pair) as w:
        assert list(w.kept) == ["far-table", "far-socket"]
        assert os.fstat(w.kept["far-table"]).st_size == 4096  # kept with the size that it has got
        assert stat.S_IMODE(w.paths.far_socket.stat().st_mode) == 0o600
        row = w.row
        assert (row.bytes, row.used_bytes, row.jobs, row.processes) == (64 * MIB, 0, 0, 0)
        assert row.problem == ""


async def test_a_device_without_far_memory_serves_none(tmp_path: Path, holder_pair: Pair) -> None:
    w, engine = World(tmp_path, holder_pair), FakeEngine()
    without = FarMemory(0, w.paths, w.holder, w.blocking)
    await without.start(cast(Engine, engine))
    await without.take_over(cast(Engine, engine), {}, Alarms())
    assert without.row() is None
    assert not engine.tables
    assert not w.paths.far_socket.exists()
    await without.pause(0.0)
    await without.close()


async def test_a_job_is_served_and_kept_before_it_is_answered(
    tmp_path: Path, holder_pair: Pair
) -> None:
    async with started(tmp_path, holder_pair) as w:
        with await w.connect():
            assert len(w.front_end.served) == 1
            assert w.hear() == ["keep far-job-0"]
            assert w.front_end.served == [os.fstat(w.kept["far-job-0"]).st_ino]
        w.front_end.processes = 3
        assert w.row.processes == 3
        assert w.row.used_bytes == 6 * MIB
        assert (w.row.counts["pages_out"], w.row.counts["back_fork"]) == (21, 3)


async def test_a_job_is_forgotten_with_its_last_process(tmp_path: Path, holder_pair: Pair) -> None:
    async with started(tmp_path, holder_pair) as w:
        job = await w.connect()
        inherited = job.dup()
        job.send(b"hello")  # which the front end would read: no end
        job.close()
        await asyncio.sleep(0.05)
        assert w.row.jobs == 1
        inherited.close()
        await w.until(lambda: w.row.jobs == 0)
        assert w.hear() == ["keep far-job-0", "drop far-job-0"]


async def test_jobs_are_bounded_as_the_holder_keeps_each(tmp_path: Path, holder_pair: Pair) -> None:
    async with started(tmp_path, holder_pair) as w:
        jobs = [await w.connect() for _ in range(far.JOBS_MAX)]
        with pytest.raises(DeviceError, match="16 jobs have far memory on the device"):
            await w.connect()
        jobs.pop(5).close()
        await w.until(lambda: w.row.jobs == far.JOBS_MAX - 1)
        w.hear()
        with await w.connect():
            assert w.hear() == ["keep far-job-5"]
        for job in jobs:
            job.close()


async def test_a_job_that_cannot_be_served_is_told_why(tmp_path: Path, holder_pair: Pair) -> None:
    async with started(tmp_path, holder_pair) as w:
        w.front_end.refusals = 1
        with pytest.raises(DeviceError, match="cannot be served: too many"):
            await w.connect()
        assert w.row.jobs == 0
        assert w.hear() == []
        (await w.connect()).close()


async def test_no_job_begins_while_the_device_stops(tmp_path: Path, holder_pair: Pair) -> None:
    async with started(tmp_path, holder_pair) as w:
        await w.far.pause(0.0)
        with pytest.raises(DeviceError, match="is being stopped"):
            await w.connect()
        w.far.resume()
        (await w.connect()).close()


@pytest.mark.parametrize(
    ("processes", "sentence"),
    [
        (1, "1 process of a job has far memory on it"),
        (2, "2 processes of a job have far memory on it"),
    ],
)
async def test_a_stop_is_refused_while_processes_have_far_memory(
    tmp_path: Path, holder_pair: Pair, processes: int, sentence: str
) -> None:
    async with started(tmp_path, holder_pair) as w:
        w.front_end.processes = processes
        with pytest.raises(ConflictError, match=sentence):
            await w.far.pause(0.0)
        (await w.connect()).close()  # nothing has changed


async def test_a_stop_waits_for_processes_that_were_killed(
    tmp_path: Path, holder_pair: Pair
) -> None:
    async with started(tmp_path, holder_pair) as w:
        w.front_end.processes = 1
        pausing = asyncio.create_task(w.far.pause(60.0))
        await asyncio.sleep(0.1)
        assert not pausing.done()
        w.front_end.processes = 0
        await pausing


async def test_an_end_takes_everything_away(tmp_path: Path, holder_pair: Pair) -> None:
    async with started(tmp_path, holder_pair) as w:
        with await w.connect():
            w.hear()
            await w.far.close()
            assert w.front_end.closed
            assert set(w.hear()) == {"drop far-job-0", "drop far-socket", "drop far-table"}
            assert not w.kept
            with pytest.raises(ConflictError, match="does not answer"):
                await w.connect()
        await w.far.close()


async def test_a_device_without_far_memory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="the device has no far memory"):
        far_client.connect(DevicePaths("d", tmp_path, tmp_path))


# ------------------------------------------------------------------------- take-over


def handed_over(world: World) -> dict[str, int]:
    """Copies of what the holder keeps, as a successor gets them beside others."""
    descriptors = {name: os.dup(fd) for name, fd in world.kept.items()}
    others = {"lock": -1, "fuse": -1}
    descriptors |= others
    kept = take_kept(descriptors)
    assert descriptors == others
    return kept


async def test_a_successor_goes_on_with_table_jobs_and_socket(
    tmp_path: Path, holder_pair: Pair
) -> None:
    w, after = World(tmp_path, holder_pair), World(tmp_path, holder_pair)
    await w.start()
    ended, job = await w.connect(), await w.connect()
    w.hear()
    kept = handed_over(w)
    await w.close()  # its descriptors, as its death does
    ended.close()
    begun = asyncio.create_task(after.connect())
    await asyncio.sleep(0.05)
    assert not begun.done()  # it waits in the socket that the holder keeps
    await after.far.take_over(cast(Engine, after.engine), kept, after.alarms)
    assert after.engine.tables == w.engine.tables
    assert sorted(after.front_end.served) == sorted(w.front_end.served)
    with await begun:
        await after.until(lambda: after.row.jobs == 2)
        heard = after.hear()
        assert {"drop far-job-0"} <= set(heard)
        assert [word for word in heard if word.startswith("keep")] in (
            ["keep far-job-0"],
            ["keep far-job-2"],
        )
    assert not after.alarms
    job.close()
    await after.until(lambda: after.row.jobs == 0)
    await after.close()


async def test_a_stop_asks_who_has_far_memory_only_after_a_take_over(
    tmp_path: Path, holder_pair: Pair
) -> None:
    w, after = World(tmp_path, holder_pair), World(tmp_path, holder_pair)
    await w.start()
    kept = handed_over(w)
    await w.close()
    after.front_end.processes, after.delay_s = 1, 0.1
    take_over = after.far.take_over(cast(Engine, after.engine), kept, after.alarms)
    taking = asyncio.create_task(take_over)
    await asyncio.sleep(0.01)
    with pytest.raises(ConflictError, match="1 process of a job has far memory"):
        await after.far.pause(0.0)
    await taking
    await after.close()


@contextlib.contextmanager
def no_descriptor_is_free() -> Iterator[None]:
    """Nothing can be opened by this process meanwhile."""
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_job_waits_while_no_descriptor_is_free(
    tmp_path: Path,
    holder_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(far, "_RETRY_S", 0.05)
    async with started(tmp_path, holder_pair) as w:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as job:
            with no_descriptor_is_free():
                job.connect(str(w.paths.far_socket))
                await asyncio.sleep(0.12)
                assert w.row.jobs == 0
            await w.until(lambda: w.row.jobs == 1)
    assert 1 <= caplog.text.count("has to wait: Too many open files") <= 3  # no busy loop


@in_virtual_time
async def test_a_take_over_that_fails_is_tried_again(tmp_path: Path, holder_pair: Pair) -> None:
    w, after = World(tmp_path, holder_pair), World(tmp_path, holder_pair, FakeEngine(failures=3))
    await w.start()
    kept = handed_over(w)
    await w.close()
    take_over = after.far.take_over(cast(Engine, after.engine), kept, after.alarms)
    taking = asyncio.create_task(take_over)
    await asyncio.sleep(1.0)
    assert "programs wait for their far memory" in after.alarms["far-memory"]
    assert "no memory for the table" in after.row.problem
    await after.far.pause(0.0)  # nobody is served, so nobody is waited for
    await asyncio.sleep(10.0)
    assert taking.done()
    assert after.row.problem == ""
    assert not after.alarms
    await after.close()
