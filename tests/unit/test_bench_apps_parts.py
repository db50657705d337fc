# SPDX-License-Identifier: Apache-2.0
"""`make bench-apps`: settings of the host, and the jobs' own programs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isw_bench import zswap
from isw_bench.apps import jobs, slowdown_plot

from infiniswap.errors import SystemCallError
from infiniswap.system.interrupts import Interrupts

# ------------------------------------------------------------------------ zswap's settings


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    directory = tmp_path / "parameters"
    directory.mkdir()
    (directory / "enabled").write_text("N\n")
    (directory / "max_pool_percent").write_text("20\n")
    return directory


def now(parameters: Path) -> dict[str, str]:
    return {path.name: path.read_text().strip() for path in parameters.iterdir()}


WANTED = {"enabled": "Y", "max_pool_percent": "2"}
BEFORE = {"enabled": "N", "max_pool_percent": "20"}


def test_zswap_is_as_it_was_after_a_measurement(tmp_path: Path, parameters: Path) -> None:
    with zswap.settings(tmp_path, Interrupts(), WANTED, parameters):
        assert now(parameters) == WANTED
    assert now(parameters) == BEFORE
    assert not (tmp_path / zswap.NOTE).exists()


@given(st.integers(1 << 20, 1 << 40), st.integers(1 << 28, 1 << 42))
def test_zswaps_pool_takes_at_most_half_of_a_limit(limit_bytes: int, memory_bytes: int) -> None:
    percent = zswap.pool_percent(limit_bytes, memory_bytes)
    if percent is None:
        assert memory_bytes / 100 > limit_bytes * 0.5
    else:
        assert 1 <= percent <= limit_bytes * 50 / memory_bytes


def test_the_next_run_puts_zswap_back_for_a_killed_one(tmp_path: Path, parameters: Path) -> None:
    context = zswap.settings(tmp_path, Interrupts(), WANTED, parameters)
    context.__enter__()  # and it is killed
    zswap.restore(tmp_path, parameters)
    assert now(parameters) == BEFORE
    zswap.restore(tmp_path, parameters)  # there is nothing left to put back
    assert now(parameters) == BEFORE


def test_a_setting_that_somebody_has_changed_meanwhile_stays(
    tmp_path: Path, parameters: Path
) -> None:
    with zswap.settings(tmp_path, Interrupts(), WANTED, parameters):
        (parameters / "max_pool_percent").write_text("30\n")
    assert now(parameters) == {"enabled": "N", "max_pool_percent": "30"}


def test_a_measurement_that_fails_to_set_zswap_puts_back_what_it_has_set(
    tmp_path: Path, parameters: Path
) -> None:
    (parameters / "refused").mkdir()
    wanted = {**WANTED, "refused": "1"}
    with pytest.raises(SystemCallError, match="cannot set zswap"):
        zswap.settings(tmp_path, Interrupts(), wanted, parameters).__enter__()
    (parameters / "refused").rmdir()
    assert now(parameters) == BEFORE


# -------------------------------------------------------------------------------- programs


def program(name: str) -> ModuleType:
    """One of the jobs' programs, which are no modules of the package."""
    spec = importlib.util.spec_from_file_location(name, jobs.PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("print('first'); print('last')", 0, "last"),
        ("raise SystemExit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("print('x' * 200_000); print('{}')", 0, "{}"),
    ],
)
def test_the_launcher_reports_how_a_job_ended_and_its_last_line(
    tmp_path: Path, script: str, code: int, said: str
) -> None:
    report = tmp_path / "report.json"
    argv = [sys.executable, str(jobs.LAUNCH), str(report), "0.0", sys.executable, "-c", script]
    done = subprocess.run(argv, timeout=60, check=False, capture_output=True)
    assert done.returncode == (1 if code else 0)
    told = json.loads(report.read_text())
    assert (told["code"], told["said"]) == (code, said)
    assert told["elapsed_s"] > 0


def test_the_balloon_reads_what_a_pool_takes() -> None:
    balloon = program("balloon")
    assert balloon.zram_bytes("4096 1000 8192 0 0 0 0 0 0") == 8192
    assert balloon.zswap_bytes("MemTotal: 1 kB\nZswap:   12 kB\nZswapped: 40 kB\n") == 12 * 1024


HISTOGRAM = """
Latency histogram (values are in milliseconds)
       value  ------------- distribution ------------- count
       1.000 |****************************************   98
       5.000 |                                           1
      90.500 |                                           1

General statistics:
    total number of events:              100
"""


def test_percentiles_come_from_sysbenchs_histogram() -> None:
    transactions = program("transactions")
    counts = transactions.histogram(HISTOGRAM)
    assert counts == [(1.0, 98), (5.0, 1), (90.5, 1)]
    assert transactions.quantile_us(counts, 0.5) == 1000
    assert transactions.quantile_us(counts, 0.98) == 5000
    assert transactions.quantile_us(counts, 0.99) == 90_500


def rival(status: str, slowdown: dict[str, float] | None) -> dict[str, Any]:
    return {"status": status, "slowdown": slowdown}


def test_only_jobs_that_ended_are_drawn() -> None:
    good = {"median": 2.0, "q1": 1.5, "q3": 2.5, "count": 3}
    rivals = {"disk": rival("ok", good), "zram": rival("timeout", None)}
    jobs_found = {
        "a": {"title": "A", "shares": {"50": {"rivals": rivals}, "25": {"rivals": {}}}},
    }
    assert slowdown_plot.lines(jobs_found) == [("A, 50 %", {"disk": good})]
