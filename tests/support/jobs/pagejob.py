# SPDX-License-Identifier: Apache-2.0
"""A job that knows every byte of its memory (tests/system/pagecheck.c), in too small a cgroup.

What it swaps out and back in is verified, again and again.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.units import MIB
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, run, until
from support.machine.runmode import IN_GUEST

NEEDS = [*NEEDS_SWAP, pytest.mark.requires_tool("cc")]
"""What a test with such a job needs."""

ROUND_S_MAX = 4 * WAIT_S
"""A round is tens of thousands of page-ins, on a machine that may have other things to do."""

# In a virtual machine a page fault takes milliseconds, and there are more interesting things to do.
JOB_MIB, LIMIT_MIB = (20, 12) if IN_GUEST else (48, 16)


@pytest.fixture(scope="session")
def pagecheck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).parents[2] / "system" / "pagecheck.c"
    binary = tmp_path_factory.mktemp("pagecheck") / "pagecheck"
    compiler = shutil.which("cc") or "cc"
    run(compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", binary, source)
    return binary


class Job:
    """pagecheck in a cgroup of its own."""

    def __init__(self, binary: Path, log: Path, rounds: int) -> None:
        self.cgroup: MemoryCgroup = create_memory_cgroup(
            f"isw-test-{secrets.token_hex(4)}", LIMIT_MIB * MIB
        )
        self._log = log
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._keep_statistics_fresh)
        seed = secrets.randbelow(1 << 31)
        script = 'read go; exec "$0" "$@"'
        with log.open("w") as output:
            self.process = subprocess.Popen(
                ["sh", "-c", script, str(binary), str(JOB_MIB), str(seed), str(rounds)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        self.cgroup.add(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()
        self._reader.start()

    def _keep_statistics_fresh(self) -> None:
        """Reading its figures makes the kernel sum up what each processor has counted.

        Linux 6.18 decides by those sums, up to four seconds old, whether the active list is to be
        shortened (mm/vmscan.c: inactive_is_low). A cgroup this small without file pages turns all
        of its memory over in less, its inactive list runs empty, and the kernel kills the job
        although swap has room. `infiniswap run` reads them several times a second anyway.
        """
        while not self._ended.wait(0.05):
            self.cgroup.memory()

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def rounds(self) -> int:
        return self.log.count("round")

    def reach(self, text: str) -> None:
        def reached() -> bool:
            assert "wrong" not in self.log, self.log
            assert self.process.poll() is None or text in self.log, self.log
            return text in self.log

        until(reached, f"{text!r} of the job", ROUND_S_MAX)

    def more_rounds(self, count: int = 1) -> None:
        """Lets it verify everything `count` times more, all of it from now on."""
        self.reach(f"round {self.rounds + count + 1}\n")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It leaves the processors to others."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def rest(self) -> None:
        """It verifies everything once more and then touches nothing."""
        self.process.send_signal(signal.SIGUSR1)
        self.reach("resting")

    def finish(self) -> None:
        """Ends it; every page must be right."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S)
        assert f"ok {JOB_MIB * 256}" in self.log, self.log
        assert self.process.returncode == 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        self._ended.set()
        self._reader.join()
        self.cgroup.remove()


StartJob = Callable[[int], Job]


@pytest.fixture
def job(pagecheck: Path, cluster: Cluster) -> Iterator[StartJob]:
    started: list[Job] = []

    def start(rounds: int) -> Job:
        started.append(Job(pagecheck, cluster.root / f"job{len(started)}", rounds))
        return started[-1]

    yield start
    # Before the cluster's end, as a device that is in use cannot be removed.
    for one in started:
        one.close()
