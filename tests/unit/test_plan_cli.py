# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan`: mistakes on the command line, what it shows, and its look at a process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from infiniswap.cli.main import main
from infiniswap.cli.plan.output import show
from infiniswap.errors import ConflictError, NotFoundError
from infiniswap.planning import history, process, report
from infiniswap.planning.misses import Look
from infiniswap.planning.prediction import Measured, Probe, fit
from infiniswap.planning.report import Planned
from infiniswap.planning.trials import Trial, curve
from infiniswap.units import MIB


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no command to plan for"),
        (["--"], "there is no command to plan for"),
        (["--probe", "--", "true"], "--probe belongs to --pid"),
        (["--pid", "1", "--", "true"], "cannot be used together"),
        (["--slowdown", "1", "--", "true"], "not a number above 1"),
        (["--slowdown", "nan", "--", "true"], "not a number above 1"),
        (["--slowdown", "inf", "--", "true"], "not a number above 1"),
        (["--plot", "/nowhere/x.png", "--", "true"], "cannot be written there"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def piped() -> Iterator[None]:
    """Standard input is a pipe."""
    before = os.dup(0)
    reader, writer = os.pipe()
    os.dup2(reader, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for descriptor in (before, reader, writer):
            os.close(descriptor)


@pytest.mark.usefixtures("piped")
def test_a_pipe_can_be_read_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--", "cat"]) == 2
    assert "standard input is a pipe" in capsys.readouterr().err


def test_forget_empties_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFINISWAP_DAEMON_STATE_DIR", str(tmp_path))
    path = history.path_in(tmp_path)
    history.add(path, Measured(1.0, 2.0))
    assert main(["plan", "--forget"]) == 0
    assert "forgot 1 measurement of" in capsys.readouterr().err
    assert not path.exists()


# -------------------------------------------------------------------------------- results


def planned(
    first_s: float = 10.0, slowdown: float = 2.0, *trials: Trial, is_cut: bool = False
) -> Planned:
    size, limit = 100 * MIB, 45 * MIB
    looks = (Look(0, 0.0, limit, size, 0, 0), Look(1, 10.0, limit, size, 0, 0))
    probe = Probe(30.0, 1.0, limit, 200_000, 14_000, (), looks, is_cut=is_cut)
    model = fit(10.0, size, probe)
    best = model.smallest(slowdown)
    head = (
        "python prep.py",
        0,
        10.0,
        first_s,
        size,
        limit,
        30.0,
        is_cut,
        200_000,
        1.0,
        100.0,
        0.0,
        slowdown,
    )
    tried = tuple(trials)
    command = "infiniswap run --local 90M"
    points = curve(model, (Trial(limit, 30.0, 200_000, is_cut), *tried))
    return Planned(*head, best, command, points, tried, ["a remark"])


def table_of(plan: Planned) -> list[list[str]]:
    """The cells of each line."""
    console = Console(file=StringIO(), width=200)
    console.print(report.table(plan))
    assert isinstance(console.file, StringIO)
    rows = [line.split("│")[1:-2] for line in console.file.getvalue().splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_table_has_each_limit_and_names_the_command() -> None:
    plan = planned()
    rows = table_of(plan)
    assert [row[1] for row in rows] == [f"{share}%" for share in range(100, 44, -5)]
    said = "\n".join(report.lines(plan))
    assert "10.0 s without a limit, and 100 MiB of memory" in said
    assert "half of its memory, 45.0 MiB: 30.0 s, a slowdown of 3.00, 200000 page-ins" in said
    assert "a remark" in said
    assert "the first run" not in said
    assert "a slowdown of 2 needs a limit of" in said
    assert said.endswith("Type: infiniswap run --local 90M")


def test_a_first_run_that_was_slower_is_mentioned() -> None:
    said = "\n".join(report.lines(planned(12.5)))
    assert "the first run took 12.5 s, as its files were not cached by then" in said


def test_what_was_tried_is_told() -> None:
    trials = (
        Trial(60 * MIB, 31.0, 4000, is_lifted=True),
        Trial(80 * MIB, 12.0, 3000),
    )
    said = "\n".join(report.lines(planned(10.0, 2.0, *trials)))
    assert "tried: 60.0 MiB: more than 31.0 s, as the limit was taken away before the end" in said
    assert "tried: 80.0 MiB: 12.0 s, a slowdown of 1.20" in said


def test_a_line_that_was_not_measured_is_marked() -> None:
    plan = planned(10.0, 2.0, Trial(80 * MIB, 12.0, 3000))
    rows = table_of(plan)
    assert rows[0][:5] == ["none", "100%", "10.0 s", "1.00", "0"]
    assert rows[-1][:5] == ["45.0 MiB", "45%", "30.0 s", "3.00", "200 000"]
    measured = [row[0] for row in rows if not row[2].startswith("~ ")]
    assert measured == ["none", "80.0 MiB", "45.0 MiB"]
    said = "\n".join(report.lines(plan))
    assert "~ estimated from the pages that came back with half of the memory" in said
    assert "≥" not in said


def test_a_probe_that_was_cut_short_tells_the_least() -> None:
    plan = planned(is_cut=True)
    rows = table_of(plan)
    assert all(row[2].startswith("≥ ") and row[3].startswith("≥ ") for row in rows[1:])
    assert rows[-1][2:4] == ["≥ 30.0 s", "≥ 3.00"]
    said = "\n".join(report.lines(plan))
    assert "≥ at least that, as the limit was taken away" in said
    assert "half of its memory, 45.0 MiB: more than 30.0 s" in said


def test_what_is_shown_has_no_escapes_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(planned(), command="'\x1b[31mx'", type="infiniswap run -- '\x1b[31mx'")
    show(argparse.Namespace(json=False, plot=None), plan)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "'?[31mx': time with less memory" in said


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    report.draw(planned(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------ processes

HOLDS = """
import sys
data = bytearray(64 << 20)
for start in range(0, len(data), 4096): data[start] = 1
print(flush=True)
while sys.stdin.readline():
    for start in range(0, 16 << 20, 4096): data[start] = 2
    print(flush=True)
"""


def test_a_process_is_seen_to_use_a_part_of_its_memory() -> None:
    argv = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        looks = process.working_set(child.pid, (0.0, 0.01))
        before = next(looks)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = next(looks)
        child.stdin.close()
    assert before.resident_bytes >= 64 * MIB
    assert before.referenced_bytes < 8 * MIB
    # The kernel may have taken some of the bits meanwhile: it looks for idle pages, too.
    assert 12 * MIB <= after.referenced_bytes < 32 * MIB


def test_a_process_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFoundError, match="no process"):
        process.require(2**22 + 1)
    assert main(["plan", "--pid", str(2**22 + 1)]) == NotFoundError.exit_code
    assert "ps aux" in capsys.readouterr().err


def test_the_limit_of_others_is_not_lowered() -> None:
    with pytest.raises(ConflictError, match="shares its memory cgroup"):
        process.cgroup_of(os.getpid())
