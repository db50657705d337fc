# SPDX-License-Identifier: Apache-2.0
"""Long work that needs processors and nothing else runs while other tests wait for disks and peers.

A module has such work when some of its tests are marked

    @pytest.mark.background

and it has a function

    def background_jobs(items, new_directory): ...   # items: its tests that are marked

which returns a `Job` by a name of its choice for each. They are begun before the first test of the
session, as many at once as there are processors, at a priority that leaves others what they want.
The marked tests come after all others that run here, when there is nobody left to yield to; each
asks for its results: `background.result(name)`. No job may look at a clock: it may stand still
for minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from support.machine.beside import is_beside
from support.machine.priority import LOWEST
from support.machine.runmode import IN_GUEST

_ENDED_LOOK_S = 1.0
Result = subprocess.CompletedProcess[bytes]


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and how long it may take once somebody waits for it."""

    argv: Sequence[str]
    cwd: Path
    time_s_max: int
    env: Mapping[str, str]


class Background:
    """Jobs under way and their results."""

    def __init__(self, jobs: Mapping[str, Job], *, low: bool) -> None:
        self._low = LOWEST if low else ()
        self._awaited = threading.Event()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._results: dict[str, Future[Result]] = {
            name: self._pool.submit(self._run, job) for name, job in jobs.items()
        }

    def result(self, name: str) -> Result:
        """Waits for it."""
        self._awaited.set()
        return self._results[name].result()

    def close(self) -> None:
        """Ends what nobody has asked for."""
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, job: Job) -> Result:
        with subprocess.Popen(
            [*self._low, *job.argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=job.cwd,
            env=job.env,
            start_new_session=True,
        ) as process:
            return self._wait(job, process)

    def _wait(self, job: Job, process: subprocess.Popen[bytes]) -> Result:
        waited_s = 0.0
        why = "ended with the test run"
        while not self._ended.is_set():
            try:
                out, err = process.communicate(timeout=_ENDED_LOOK_S)
                return subprocess.CompletedProcess(job.argv, process.returncode, out, err)
            except subprocess.TimeoutExpired:
                waited_s += _ENDED_LOOK_S if self._awaited.is_set() else 0.0
            if waited_s > job.time_s_max:
                why = f"killed after {job.time_s_max} s"
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        said = f"\n{why}\n".encode()
        return subprocess.CompletedProcess(job.argv, process.returncode, out, err + said)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_marked)  # stable


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "background: its work runs while other tests do")


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("background") is not None


@pytest.fixture(scope="session", autouse=not IN_GUEST)
def background(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Background]:
    """The jobs of all tests of this session."""
    items = [item for item in request.session.items if not is_beside(item)]  # that pytest has them
    marked = [item for item in items if isinstance(item, pytest.Function) and _is_marked(item)]
    jobs: dict[str, Job] = {}
    for module, own in groupby(marked, key=lambda item: item.module):
        jobs |= module.background_jobs(list(own), lambda: tmp_path_factory.mktemp("background"))
    running = Background(jobs, low=True)
    yield running
    running.close()
