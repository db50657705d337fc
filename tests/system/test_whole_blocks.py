# SPDX-License-Identifier: Apache-2.0
"""The attendant of a job brings parts of its memory back in whole, and the job keeps its bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, until
from support.jobs import block_job, mixed_job
from support.jobs.attendants import attendants, await_attendant
from support.jobs.runs import Runner, ready

from infiniswap.system.major_faults import MajorFaults

pytestmark = NEEDS_SWAP

JOB_MIB, LOCAL = 384, "256M"
BLOCK_PAGES = 512


class Walker:
    """The job, under `infiniswap run`."""

    def __init__(self, runner: Runner) -> None:
        argv = (sys.executable, block_job.__file__, str(JOB_MIB))
        options = ("--quiet", "--size", "320M")
        self.process = runner.popen(*argv, options=options, local=LOCAL, stdin=subprocess.PIPE)
        ready(self.process)
        self.cgroup = runner.cgroup(self.process)

    def walk(self) -> int:
        """Major faults of one walk, whose bytes were all right."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=WAIT_S)[1].decode()
        found = json.loads(line)
        assert found["wrong"] == 0
        return int(found["faults"])

    def attendant(self) -> int:
        return await_attendant(self.cgroup.path)

    def end(self) -> None:
        stderr = self.process.communicate(timeout=2 * WAIT_S)[1]
        assert self.process.returncode == 0, stderr.decode()


def mapped_by(attendant: int) -> int:
    """Pages that it has mapped: its own, and those of blocks."""
    fields = Path("/proc", str(attendant), "stat").read_text().rpartition(")")[2].split()
    return int(fields[7]) + int(fields[9])  # minflt, majflt


def attended(job: Walker) -> int:
    """Waits until the job has half of the faults that it has alone; returns those."""
    attendant = job.attendant()
    os.kill(attendant, signal.SIGSTOP)
    try:
        alone = min(job.walk(), job.walk())
    finally:
        os.kill(attendant, signal.SIGCONT)
    until(lambda: job.walk() < alone / 2, "a walk with few faults")
    return alone


def test_a_job_waits_for_few_of_its_pages_as_long_as_it_is_attended(runner: Runner) -> None:
    job = Walker(runner)
    alone = attended(job)
    os.kill(job.attendant(), signal.SIGKILL)
    until(lambda: not attendants(job.cgroup.path), "the attendant to end")
    job.walk()
    assert job.walk() > alone / 2
    job.end()


def test_faults_are_told_with_process_and_address(runner: Runner) -> None:
    job = Walker(runner)
    (pid,) = job.cgroup.pids()
    os.kill(job.attendant(), signal.SIGKILL)
    faults = MajorFaults()
    try:
        job.walk()
        assert list(faults.take()) == []  # not started
        faults.start()
        job.walk()
        found = [fault.address for fault in faults.take() if fault.pid == pid]
        faults.stop()
    finally:
        faults.close()
    mapped = Path("/proc", str(pid), "maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
    assert found
    assert all(any(low <= at < high for low, high in spans) for at in found)
    job.end()


def test_a_run_ends_while_blocks_come_back(runner: Runner) -> None:
    job = Walker(runner)
    attendant = job.attendant()
    assert job.process.stdin is not None
    job.process.stdin.write(b"\n" * 50)
    job.process.stdin.flush()
    until(lambda: mapped_by(attendant) > 20 * BLOCK_PAGES, "some blocks to come back")
    job.process.send_signal(signal.SIGTERM)
    job.process.communicate(timeout=WAIT_S)
    assert job.process.returncode == 128 + signal.SIGTERM
    until(lambda: not attendants(job.cgroup.path), "the attendant to end")


@pytest.mark.timeout(3600)
def test_a_job_of_many_ways_goes_on_with_right_bytes(
    runner: Runner, count: Callable[[int, int], int]
) -> None:
    """The kernel ends a job whose memory is turned over faster than it notices (ADR 54)."""
    argv = (sys.executable, mixed_job.__file__, str(JOB_MIB), "1", str(count(5, 300)))
    options = ("--quiet", "--size", "512M")
    process = runner.popen(*argv, options=options, local=LOCAL)
    attendant = await_attendant(runner.cgroup(process).path)
    until(lambda: mapped_by(attendant) > 20 * BLOCK_PAGES, "some blocks to come back")
    out, told = process.communicate(timeout=3000)
    assert (process.returncode, out) == (0, b"0\n"), told.decode()
