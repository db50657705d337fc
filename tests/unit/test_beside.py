# SPDX-License-Identifier: Apache-2.0
"""Tests that a second pytest runs are told as if they had run in the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_RUN_S = 120.0
_INI = """
[pytest]
testpaths = tests
pythonpath = {root}/tests {root}/tools
addopts = --import-mode=importlib -p no:cacheprovider
"""
_CONFTEST = """
import os

from support.machine import beside, elsewhere
import pytest

os.sched_getaffinity = lambda _pid: {0, 1}  # where the tests have one processor, too

def pytest_configure(config):
    elsewhere.write_reports(config)
    if beside.is_wanted(config):
        config.pluginmanager.register(beside.Beside())

@pytest.fixture(autouse=True)
def say_where(request):
    with open(request.config.rootpath / "seen", "a") as file:
        file.write(f"{request.node.name} {os.getpid()}\\n")
"""
_HERE = """
def test_here():
    pass
"""
_THERE = """
import os

import pytest

@pytest.mark.parametrize("word", ["", "a b", "[c]", "é", "a::b/c"])
def test_passes(word):
    pass

def test_fails():
    print("what it printed")
    assert 1 == 2

def test_skips():
    pytest.skip("for that reason")

@pytest.mark.xfail(strict=True)
def test_is_known():
    raise ValueError

def test_dies():
    os.kill(os.getpid(), 9)

def test_after():
    pass

@pytest.mark.parametrize("pid", [os.getpid()])
def test_with_another_name_there(pid):
    pass
"""


@pytest.fixture
def project(tmp_path: Path, project_root: Path) -> Path:
    """A tree with tests in both kinds of rooms."""
    (tmp_path / "pytest.ini").write_text(_INI.format(root=project_root))
    for name, text in (
        ("conftest.py", _CONFTEST),
        ("system/test_a.py", _HERE),
        ("unit/test_b.py", _THERE),
    ):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def _pytest(project: Path, *argv: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "pytest", *argv]
    return subprocess.Popen(
        line,
        cwd=project,
        env={**os.environ, "TMPDIR": str(project)},  # one that is killed leaves files
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _output(project: Path, *argv: str) -> str:
    with _pytest(project, *argv) as run:
        return run.communicate(timeout=_RUN_S)[0]


def _processes(project: Path) -> dict[str, set[str]]:
    """Of each test."""
    found: dict[str, set[str]] = {}
    for line in (project / "seen").read_text(encoding="utf-8").splitlines():
        name, _, pid = line.rpartition(" ")
        found.setdefault(name, set()).add(pid)
    return found


def test_a_whole_run_is_told_as_one(project: Path) -> None:
    text = _output(project, "-rs", "--durations=0", "-vv")
    assert "3 failed, 7 passed, 1 skipped, 1 xfailed" in text
    assert "what it printed" in text  # of the test that fails
    assert "assert 1 == 2" in text
    assert "for that reason" in text
    assert "the other pytest ended (status -9)" in text  # and is begun again for the rest
    seen = _processes(project)
    (here,) = seen.pop("test_here")
    assert all(here not in pids and len(pids) == 1 for pids in seen.values()), seen
    assert seen["test_fails"] == seen["test_dies"] != seen["test_after"]
    assert len(set.union(*seen.values())) == 2


@pytest.mark.parametrize("argv", [["tests"], ["-s"], ["--pdb", "-k", "passes or here"]])
def test_a_part_and_what_somebody_watches_run_in_one(project: Path, argv: list[str]) -> None:
    _output(project, "-k", "not dies", *argv)
    assert len(set.union(*_processes(project).values())) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_neither_outlives_the_other(project: Path, number: signal.Signals) -> None:
    pause = "import time\n\ndef test_pause():\n    time.sleep(100)\n"
    for room in ("system/test_a.py", "unit/test_b.py"):
        (project / "tests" / room).write_text(pause)
    with _pytest(project) as run:
        pids = _await_two(project)
        run.send_signal(number)
        run.communicate(timeout=_RUN_S)
    end_s = time.monotonic() + _RUN_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _await_two(project: Path) -> set[str]:
    end_s = time.monotonic() + _RUN_S
    while time.monotonic() < end_s:
        pids = _processes(project).get("test_pause", set()) if (project / "seen").exists() else {""}
        if len(pids) == 2:
            return pids
        time.sleep(0.05)
    pytest.fail("no second pytest has begun")
