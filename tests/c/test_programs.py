# SPDX-License-Identifier: Apache-2.0
"""Every C test program (tests/c/test_*.c), plain and under sanitizers: exit 0, 1, or 77 (skip).

They run ahead of the tests that look at them, one for each processor: most use one at most.
Simulations take longest and have a clock of their own: they run beside the rest of the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.machine import sanitizers
from support.machine.background import Background, Job

_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("test_*.c"))
_SKIPPED = 77
_TIME_S_MAX = 280
_BUILDS = {"tsan": "make tsan", "asan": "make asan", "c": "make setup"}
"""How each is made; the slowest come first, so that none is left alone at the end."""

_ONE_THREAD = ("test_far_blocks",)
"""Beside simulations: ThreadSanitizer sees nothing there, and takes a minute for it."""


def _is_simulation(program: str) -> bool:
    return program.endswith("_sim")


_LONGEST = "c-test_far_job"
"""Begun first, so that nobody waits for it alone in the end."""


def _binary(build: str, program: str) -> Path:
    return _ROOT / "build" / build / "tests" / program


def background_jobs(
    items: Sequence[pytest.Function], new_directory: Callable[[], Path]
) -> dict[str, Job]:
    """The programs that these tests are about, as far as they are built."""
    jobs = {}
    for item in items:
        build, program = (str(item.callspec.params[name]) for name in ("build", "program"))
        if (binary := _binary(build, program)).exists():
            argv = sanitizers.command(build, [str(binary)])
            jobs[f"{build}-{program}"] = Job(argv, new_directory(), _TIME_S_MAX, sanitizers.ENV)
    return jobs


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Background]:
    """Those that are no simulations."""
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_c_program
    ]
    jobs = background_jobs(items, lambda: tmp_path_factory.mktemp("program"))
    jobs = dict(sorted(jobs.items(), key=lambda job: job[0] != _LONGEST))
    running = Background(jobs, low=False)
    yield running
    running.close()


def _check(build: str, program: str, runs: Background, in_ci: bool) -> None:
    if build != "c" and not in_ci and not _binary(build, program).exists():
        pytest.skip(f"no {build} build: {_BUILDS[build]}")
    assert _binary(build, program).exists(), f"not built: run `{_BUILDS[build]}`"
    done = runs.result(f"{build}-{program}")
    output = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == _SKIPPED:
        pytest.skip(output.strip().splitlines()[-1] if output.strip() else "no reason given")
    assert done.returncode == 0, f"exit {done.returncode}\n{output[-8000:]}"


@pytest.mark.parametrize(
    ("build", "program"),
    [
        (build, name)
        for build in _BUILDS
        for name in _PROGRAMS
        if not _is_simulation(name) and not (build == "tsan" and name in _ONE_THREAD)
    ],
)
def test_c_program(build: str, program: str, in_ci: bool, programs: Background) -> None:
    _check(build, program, programs, in_ci)


@pytest.mark.background
@pytest.mark.parametrize("program", [name for name in _PROGRAMS if _is_simulation(name)])
@pytest.mark.parametrize("build", [name for name in _BUILDS if name != "tsan"])  # one thread
def test_c_simulation(build: str, program: str, in_ci: bool, background: Background) -> None:
    _check(build, program, background, in_ci)
