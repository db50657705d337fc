# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan` on real jobs: what it predicts, what it refuses, and that nothing is left."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S
from support.jobs.plans import plan_in, second_long
from support.jobs.runs import Runner, touch

from infiniswap.planning import history
from infiniswap.planning.trials import TRIALS_MAX
from infiniswap.units import MIB

pytestmark = NEEDS_SWAP


def plan(
    runner: Runner, *command: str, options: tuple[str, ...] = (), **more: Any
) -> subprocess.CompletedProcess[bytes]:
    """Runs `infiniswap plan` to its end."""
    argv = [sys.executable, "-m", "infiniswap", "plan", *options]
    if "--donors" not in options:
        argv += ["--donors", runner.cluster.addresses]
    process = runner.start([*argv, "--", *command], **more)
    stdout, stderr = process.communicate(timeout=2 * WAIT_S)
    assert b"Traceback" not in (stderr or b""), stderr.decode()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def job(mib: int) -> list[str]:
    """One that takes two seconds, so that its peak is seen, and pages under a limit."""
    return second_long(touch(mib, 24))


def parsed(done: subprocess.CompletedProcess[bytes]) -> Any:
    """The plan of one that has gone well."""
    assert done.returncode == 0, done.stderr.decode()
    return plan_in(done.stdout.decode())


def test_a_plan_measures_predicts_and_names_a_command(runner: Runner) -> None:
    found = parsed(plan(runner, *job(64), options=("--json", "--size", "256M")))
    assert 64 * MIB < found["peak_bytes"] < 96 * MIB
    assert found["probe_limit_bytes"] <= found["peak_bytes"] / 2
    assert found["probe_page_ins"] > 0
    assert 0 < found["probe_share"] <= 1
    assert found["probe_elapsed_s"] > found["elapsed_s"]
    curve = found["curve"]
    assert curve[0]["elapsed_s"] == found["elapsed_s"]
    assert curve[-1]["limit_bytes"] <= found["probe_limit_bytes"]
    assert curve[0]["source"] == "measured"
    assert curve[-1]["source"] != "estimated"
    for more, less in pairwise([point for point in curve if point["source"] == "estimated"]):
        assert more["elapsed_s"] <= less["elapsed_s"]
        assert more["page_ins"] <= less["page_ins"]
    assert curve[-1]["page_ins"] > 0
    best, tried = found["recommended"], found["tried"]
    assert len(tried) <= TRIALS_MAX
    assert best["slowdown"] <= 1.15
    assert best["remote_bytes"] == 0 or best["limit_bytes"] in [
        each["limit_bytes"] for each in tried
    ]
    words = shlex.split(found["type"])
    assert words[:3] == ["infiniswap", "run", "--local"]
    assert words[words.index("--size") + 1] == "256M"
    assert words[words.index("--") + 1 :] == job(64)
    state = Path(runner.cluster.env.get("INFINISWAP_DAEMON_STATE_DIR", "/nowhere"))
    assert len(history.read(history.path_in(state))) == 1


@pytest.mark.full
def test_a_job_that_fails_is_told_with_its_exit_code(runner: Runner) -> None:
    done = plan(runner, "sh", "-c", "sleep 1; exit 7")
    assert done.returncode == 7
    assert b"ended with exit code 7: no time is predicted" in done.stdout
    assert b"run 2" not in done.stderr


@pytest.mark.full
def test_a_job_that_ends_at_once_has_a_peak_and_no_curve(runner: Runner) -> None:
    found = parsed(plan(runner, "true", options=("--json",)))
    assert found["curve"] == []
    assert found["recommended"] is None
    assert "too soon to predict" in found["notes"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (1, "the run with half of the memory ended with exit code 3"),
        (2, "the second run without a limit ended with exit code 3, so no limit was tried"),
        (3, "ended with exit code 3, so no other limit was tried"),
    ],
)
def test_a_job_that_fails_later_gets_what_is_known(
    runner: Runner, tmp_path: Path, runs: int, words: str
) -> None:
    done = tmp_path / "done"
    done.touch()
    script = f"test $(wc -l <{done}) -eq {runs} && exit 3; echo >>{done}; {shlex.join(job(64))}"
    # However slow paging is here, some limit is foreseen to be quick enough, and tried.
    options = ("--json", "--slowdown", "1000", "--size", "256M")
    planned = plan(runner, "sh", "-c", script, options=options)
    assert planned.returncode == (3 if runs == 1 else 0), planned.stderr.decode()
    found = plan_in(planned.stdout.decode())
    assert any(words in note for note in found["notes"])
    assert found["peak_bytes"] > 64 * MIB
    assert found["tried"] == []
    assert (found["curve"] == []) == (runs == 1)
    if runs > 1:
        assert found["recommended"]["remote_bytes"] == 0


@pytest.mark.full
def test_each_run_reads_a_file_from_its_beginning(runner: Runner, tmp_path: Path) -> None:
    given, seen = tmp_path / "given", tmp_path / "seen"
    given.write_text("a line\n")
    script = f"cat >>{seen}; {shlex.join(job(48))}"
    with given.open() as stdin:
        found = parsed(plan(runner, "sh", "-c", script, options=("--json",), stdin=stdin))
    assert seen.read_text() == "a line\n" * (3 + len(found["tried"]))


@pytest.mark.full
def test_a_job_that_asks_its_user_is_ended(runner: Runner) -> None:
    primary, secondary = pty.openpty()
    try:
        done = plan(runner, "sh", "-c", "read answer", stdin=secondary)
    finally:
        os.close(primary)
        os.close(secondary)
    assert done.returncode == 2
    assert b"waits for input from the terminal" in done.stderr


@pytest.mark.full
def test_without_donors_the_disk_is_planned_for(runner: Runner) -> None:
    argv = [sys.executable, "-m", "infiniswap", "plan", "--json", "--", *job(64)]
    process = runner.start(argv)
    stdout, stderr = process.communicate(timeout=2 * WAIT_S)
    found = parsed(subprocess.CompletedProcess(argv, process.returncode, stdout, stderr))
    assert "the local disk alone" in found["notes"][0]
    assert found["probe_page_ins"] > 0
