# SPDX-License-Identifier: Apache-2.0
"""The processors that a job under `infiniswap run` chooses are its own business.

The attendant, which makes the kernel forget processors that the job has left, changes neither masks
nor cpusets."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S
from support.jobs import affinity_job
from support.jobs.attendants import await_looks
from support.jobs.runs import Runner

from infiniswap.system import left_processors

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.skipif(
        not left_processors.is_needed_here(),
        reason="this kernel keeps no processors that were left: nothing strikes them off",
    ),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]

CPUSETS = Path("/sys/fs/cgroup/cpuset")
HOME, AWAY = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))


def masks(pid: int) -> dict[int, str]:
    """Processors that each thread of a process may use, as the kernel writes them."""
    found = {}
    for task in Path("/proc", str(pid), "task").iterdir():
        status = (task / "status").read_text()
        line = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
        assert line is not None
        found[int(task.name)] = line[1]
    return found


class Chooser:
    """The job, under `infiniswap run`."""

    def __init__(self, runner: Runner, what: str, *before: str) -> None:
        argv = [*before, sys.executable, affinity_job.__file__, what]
        self._process = runner.popen(*argv, options=("--quiet",), stdin=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate(timeout=WAIT_S)[1].decode()
        self.threads: dict[str, int] = json.loads(line)
        self._cgroup = runner.cgroup(self._process)

    @property
    def masks(self) -> dict[int, str]:
        return masks(self.threads["first"])

    def await_attendant(self) -> None:
        await_looks(self._cgroup.path)

    def end(self) -> dict[str, Any]:
        """What the job saw."""
        stdout, stderr = self._process.communicate(b"\n", timeout=2 * WAIT_S)
        assert self._process.returncode == 0, stderr.decode()
        found: dict[str, Any] = json.loads(stdout)
        assert found["looks"] > 10
        return found


def test_each_thread_keeps_the_processor_that_it_chose(device_runner: Runner) -> None:
    job = Chooser(device_runner, "keep")
    job.await_attendant()
    chosen = {job.threads["first"]: str(HOME), job.threads["second"]: str(AWAY)}
    assert job.masks == chosen
    assert job.end()["foreign"] == 0


@pytest.mark.requires_tool("taskset")
def test_a_mask_set_before_the_program_stays(device_runner: Runner) -> None:
    job = Chooser(device_runner, "inherit", "taskset", "--cpu-list", str(AWAY))
    job.await_attendant()
    assert set(job.masks.values()) == {str(AWAY)}
    assert job.end()["foreign"] == 0


def test_a_job_that_changes_its_mask_never_sees_another(device_runner: Runner) -> None:
    job = Chooser(device_runner, "change")
    job.await_attendant()
    assert job.end()["foreign"] == 0


@pytest.fixture
def cpuset() -> Iterator[Path]:
    """One with a single processor."""
    if not (CPUSETS / "cpuset.cpus").exists():
        pytest.skip("needs the cpuset controller of cgroup version 1")
    path = CPUSETS / f"isw-test-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        (path / "cpuset.mems").write_text((CPUSETS / "cpuset.mems").read_text())
        (path / "cpuset.cpus").write_text(str(AWAY))
        yield path
    finally:
        path.rmdir()


def test_a_job_stays_in_its_own_cpuset(device_runner: Runner, cpuset: Path) -> None:
    script = 'echo $$ >"$0" && exec "$@"'
    job = Chooser(device_runner, "inherit", "sh", "-c", script, str(cpuset / "cgroup.procs"))
    job.await_attendant()
    assert (cpuset / "cpuset.cpus").read_text().strip() == str(AWAY)
    assert (cpuset / "cgroup.procs").read_text().split() == [str(job.threads["first"])]
    assert set(job.masks.values()) == {str(AWAY)}
    assert job.end()["foreign"] == 0
