# SPDX-License-Identifier: Apache-2.0
"""Page-out of a process that was moved around, counted in interrupts of processors it has left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, until
from support.jobs import hopping_job
from support.jobs.attendants import attendants
from support.jobs.pagejob import NEEDS

from infiniswap.device.jobs.attendant import Attendant
from infiniswap.system import left_processors
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.left_processors import LeftProcessors
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [
    *NEEDS,
    pytest.mark.skipif(
        not left_processors.is_needed_here(),
        reason="this kernel keeps none that were left",
    ),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]

PART_BYTES = 8 * MIB
PARTS = 16
AGAIN_S = 1.1
"""The kernel strikes off at most once a second."""


class Hopper:
    """The job, and programs that keep the processors it has left from idling."""

    def __init__(self, cgroup: MemoryCgroup) -> None:
        argv = [sys.executable, hopping_job.__file__, str(PART_BYTES), str(PARTS)]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        cgroup.add(self.process.pid)
        self.home, *others = sorted(os.sched_getaffinity(0))
        self.others = others
        spin = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
        self.spinners: list[subprocess.Popen[bytes]] = []
        self._answer()
        for processor in others:
            self.spinners.append(subprocess.Popen([sys.executable, "-c", spin, str(processor)]))

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def interrupts(self) -> int:
        """TLB shootdowns so far of the processors that it has left."""
        lines = Path("/proc/interrupts").read_text().splitlines()
        names = lines[0].split()
        counts = next(line.split()[1:] for line in lines if line.split()[0] == "TLB:")
        return sum(int(counts[names.index(f"CPU{processor}")]) for processor in self.others)

    def interrupts_of_page_out(self) -> int:
        """How many the next part takes."""
        assert self.process.stdin is not None
        before = self.interrupts()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._answer() == "done\n"
        return self.interrupts() - before

    def end(self) -> None:
        for spinner in self.spinners:
            spinner.kill()
            spinner.wait()
        self.process.kill()
        with self.process:  # closes the pipes
            pass


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    made = create_memory_cgroup(f"infiniswap-test-{os.getpid()}", PARTS * PART_BYTES + 64 * MIB)
    yield made
    made.kill()
    made.remove()


@pytest.fixture
def hopper(shared_cluster: Cluster, cgroup: MemoryCgroup) -> Iterator[Hopper]:
    shared_cluster.start("--swap", size="256M")
    job = Hopper(cgroup)
    yield job
    job.end()


PAGES = PART_BYTES // PAGE_BYTES
INTERRUPTS_MIN = PAGES / 8
"""Most hosts have one for each page; on an EPYC of 2024 (Zen 5) there was one for four pages."""


def test_they_are_interrupted_for_pages_until_struck_off(hopper: Hopper) -> None:
    assert hopper.interrupts_of_page_out() > INTERRUPTS_MIN
    left = LeftProcessors()

    def struck_off() -> bool:
        time.sleep(AGAIN_S)
        assert left.strike_off([hopper.process.pid]) == 1
        return hopper.interrupts_of_page_out() < PAGES / 20

    until(struck_off, "page-out that interrupts nobody")


def test_the_attendant_of_a_job_strikes_them_off(hopper: Hopper, cgroup: MemoryCgroup) -> None:
    assert hopper.interrupts_of_page_out() > INTERRUPTS_MIN
    attendant = Attendant(cgroup, wanted=True)
    attendant.look(cgroup.memory().swap_bytes or 0)
    try:

        def struck_off() -> bool:
            time.sleep(AGAIN_S)
            return hopper.interrupts_of_page_out() < PAGES / 20

        until(struck_off, "page-out that interrupts nobody")
    finally:
        attendant.end()


def test_an_attendant_ends_with_its_runner(cgroup: MemoryCgroup) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from infiniswap.system.cgroup import MemoryCgroup\n"
        "from infiniswap.device.jobs.attendant import Attendant\n"
        "a = Attendant(MemoryCgroup(Path(sys.argv[1]), int(sys.argv[2])), wanted=True)\n"
        "a.look(4096)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    argv = [sys.executable, "-c", code, str(cgroup.path), str(cgroup.version)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as runner:
        assert runner.stdout is not None
        try:
            assert runner.stdout.readline()
            # For a moment a process that was just executed has no command line.
            until(lambda: set(attendants(cgroup.path)) > {str(runner.pid)}, "the attendant to run")
        finally:
            runner.kill()
    until(lambda: not attendants(cgroup.path), "the attendant to end")


def test_one_that_is_not_wanted_or_not_needed_yet_is_not_started(cgroup: MemoryCgroup) -> None:
    member, early = Attendant(cgroup, wanted=False), Attendant(cgroup, wanted=True)
    member.look(4096)
    early.look(0)
    assert not attendants(cgroup.path)
    for attendant in (member, early):
        attendant.end()
