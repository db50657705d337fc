# SPDX-License-Identifier: Apache-2.0
"""Job cgroups of the real kernel: limits, figures, killing, removing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import until

from infiniswap.errors import ConflictError, InfiniswapError, NotFoundError, UnavailableError
from infiniswap.system import cgroup, memory
from infiniswap.system.pressure import PressureTrigger
from infiniswap.units import MIB

pytestmark = pytest.mark.requires_memcg

LIMIT_BYTES = 64 * MIB


@pytest.fixture
def job() -> Iterator[cgroup.MemoryCgroup]:
    made = cgroup.create_memory_cgroup(cgroup.run_cgroup_name(uuid.uuid4().hex[:8]), LIMIT_BYTES)
    try:
        yield made
    finally:
        made.kill()
        made.remove()


@contextlib.contextmanager
def _started(job: cgroup.MemoryCgroup, script: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `script` once it is in the cgroup."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"input()\n{script}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        job.add(child.pid)
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        yield child
    finally:
        child.kill()
        child.communicate()


def test_the_limit_is_the_one_asked_for(job: cgroup.MemoryCgroup) -> None:
    figures = job.memory()
    assert figures.limit_bytes == LIMIT_BYTES
    assert figures.oom_kills == 0
    assert figures.anon_bytes == 0
    assert job.path in [found.path for found in cgroup.find_run_cgroups()]
    with pytest.raises(ConflictError):
        cgroup.create_memory_cgroup(job.name, LIMIT_BYTES)


def test_a_jobs_memory_is_seen_and_its_end_too(job: cgroup.MemoryCgroup) -> None:
    script = "b = bytearray(b'x') * (30 << 20)\nprint('up', flush=True)\ninput()"
    with _started(job, script) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert job.pids() == (child.pid,)
        # What each processor counted reaches the file within two seconds.
        until(lambda: job.memory().anon_bytes >= 30 * MIB, "all of its memory")
        figures = job.memory()
        assert figures.anon_bytes <= figures.usage_bytes <= LIMIT_BYTES
        limited = memory.host_memory(pid=child.pid)
        assert (limited.total_bytes, limited.limited_by) == (LIMIT_BYTES, str(job.path))
        assert limited.available_bytes <= LIMIT_BYTES - 30 * MIB
        with pytest.raises(ConflictError, match=r"still has 1 process$"):
            job.remove(timeout_s=0.1)
        job.kill()
        assert child.wait(timeout=60) == -signal.SIGKILL
    assert job.pids() == ()
    peak = job.memory().peak_bytes
    assert peak is None or peak >= 30 * MIB


def test_children_and_inner_cgroups_are_killed_too(job: cgroup.MemoryCgroup) -> None:
    script = (
        "import subprocess, sys\n"
        "children = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        "            for _ in range(3)]\n"
        "print('up', flush=True)\n"
        "children[0].wait()"
    )
    with _started(job, script) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        inner = cgroup.MemoryCgroup(job.path / "inner", job.version)
        inner.path.mkdir()
        pids = job.pids()
        assert len(pids) == 4
        if job.version == 1:  # version 2 wants processes in leaves only
            inner.add(pids[-1])
        assert set(job.pids()) == set(pids)
        job.kill()
        child.wait(timeout=60)
    job.remove()
    assert not job.path.exists()


def test_an_out_of_memory_kill_is_counted(job: cgroup.MemoryCgroup) -> None:
    # Whatever swap this host has, the job may not use it here.
    if job.version == 2:
        (job.path / "memory.swap.max").write_text("0")
    else:
        (job.path / "memory.memsw.limit_in_bytes").write_text(str(LIMIT_BYTES))
    with _started(job, "b = bytearray(b'x') * (128 << 20)") as child:
        assert child.wait(timeout=60) == -signal.SIGKILL
    figures = job.memory()
    assert figures.oom_kills is not None
    assert figures.oom_kills >= 1


def test_a_process_that_is_gone_cannot_be_added(job: cgroup.MemoryCgroup) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(NotFoundError, match=str(child.pid)):
        job.add(child.pid)


def test_the_limit_can_be_changed(job: cgroup.MemoryCgroup) -> None:
    job.set_limit(2 * LIMIT_BYTES)
    assert job.memory().limit_bytes == 2 * LIMIT_BYTES


def test_using_a_removed_cgroup_is_an_error_not_a_crash(job: cgroup.MemoryCgroup) -> None:
    job.remove()
    for act in (job.memory, lambda: job.set_limit(MIB), lambda: job.add(1)):
        with pytest.raises(InfiniswapError):
            act()
    assert job.pids() == ()
    job.kill()
    job.remove()


THRASH = """
import os, sys
file = os.open({path!r}, os.O_RDWR | os.O_CREAT)
os.truncate(file, 192 << 20)
while True:
    for place in range(0, 192 << 20, 1 << 20):
        os.pwrite(file, b"x" * (1 << 20), place)
"""


def test_an_event_loop_hears_once_each_time_that_a_job_waits_for_memory(
    job: cgroup.MemoryCgroup, tmp_path: Path
) -> None:
    try:
        trigger = PressureTrigger()
    except UnavailableError as error:
        pytest.skip(f"this kernel grants no trigger: {error}")

    async def heard(times: int) -> None:
        fired = asyncio.Semaphore(0)
        asyncio.get_running_loop().add_reader(trigger.fileno(), fired.release)
        async with asyncio.timeout(120.0):
            for _ in range(times):
                await fired.acquire()
        assert fired.locked()

    with contextlib.closing(trigger), _started(job, THRASH.format(path=str(tmp_path / "file"))):
        asyncio.run(heard(2))
