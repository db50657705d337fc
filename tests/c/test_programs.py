# SPDX-License-Identifier: Apache-2.0
"""Every C test program (tests/c/test_*.c), plain and under sanitizers: exit 0, 1, or 77 (skip).

They run ahead of the tests that look at them, one for each processor: most use one at most.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import sanitizers

_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("test_*.c"))
_SKIPPED = 77
_TIME_S_MAX = 280
_BUILDS = {"c": "make setup", "asan": "make asan", "tsan": "make tsan"}

_Key = tuple[str, str]


def _binary(key: _Key) -> Path:
    build, program = key
    return _ROOT / "build" / build / "tests" / program


class _Runs:
    """Programs under way and their results."""

    def __init__(self, keys: list[_Key], work: Path) -> None:
        self._work = work
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._results: dict[_Key, Future[subprocess.CompletedProcess[bytes]]] = {
            key: self._pool.submit(self._run, key) for key in keys if _binary(key).exists()
        }

    def _run(self, key: _Key) -> subprocess.CompletedProcess[bytes]:
        directory = self._work / "-".join(key)
        directory.mkdir()
        command = sanitizers.command(key[0], [str(_binary(key))])
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=sanitizers.ENV,
        ) as process:
            for _ in range(_TIME_S_MAX):
                try:
                    out, err = process.communicate(timeout=1.0)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if self._ended.is_set():
                        break
            process.kill()
            out, err = process.communicate()
            said = f"\nkilled after {_TIME_S_MAX} s\n".encode()
            return subprocess.CompletedProcess(command, process.returncode, out, err + said)

    def result(self, key: _Key) -> subprocess.CompletedProcess[bytes]:
        """Waits for it."""
        return self._results[key].result()

    def close(self) -> None:
        """Ends what nobody has asked for."""
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Runs]:
    wanted = [
        (item.callspec.params["build"], item.callspec.params["program"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_c_program
    ]
    own = _Runs(wanted, tmp_path_factory.mktemp("programs"))
    yield own
    own.close()


@pytest.mark.parametrize("program", _PROGRAMS)
@pytest.mark.parametrize("build", _BUILDS)
def test_c_program(build: str, program: str, in_ci: bool, runs: _Runs) -> None:
    key = build, program
    if build != "c" and not in_ci and not _binary(key).exists():
        pytest.skip(f"no {build} build: {_BUILDS[build]}")
    assert _binary(key).exists(), f"not built: run `{_BUILDS[build]}`"
    done = runs.result(key)
    output = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == _SKIPPED:
        pytest.skip(output.strip().splitlines()[-1] if output.strip() else "no reason given")
    assert done.returncode == 0, f"exit {done.returncode}\n{output[-8000:]}"
