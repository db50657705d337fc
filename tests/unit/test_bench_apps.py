# SPDX-License-Identifier: Apache-2.0
"""`make bench-apps`: which cells are measured, what is kept of them, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from isw_bench.apps import plan, summary, tables
from isw_bench.apps.accounting import (
    BusyTimes,
    ProcessTimes,
    kernel_kind,
    kernel_thread_kind,
    parse_stat,
    parse_vmstat,
)
from isw_bench.apps.cell import agrees, front_end, judged
from isw_bench.apps.jobs import FULL, JOBS, QUICK, TINY
from isw_bench.apps.ledger import Ledger
from isw_bench.apps.plan import Cell
from isw_bench.apps.rivals import parse_mm_stat

GIB = 1 << 30
PEAK_BYTES = 4 * GIB


def result(
    elapsed_s: float = 10.0, *, status: str = plan.OK, paged_in_bytes: int = PEAK_BYTES, **more: Any
) -> dict[str, Any]:
    return {
        "status": status,
        "elapsed_s": elapsed_s,
        "took_s": elapsed_s + 1,
        "busy_s": {"job": 8.0, "device": 1.0, "donors": 0.5, "kernel": {"loop": 0.25, "x": 0.5}},
        "memory": {"anon_bytes": PEAK_BYTES, "inside_bytes": 2 * GIB, "pool_bytes": 0},
        "paged": {"in_bytes": paged_in_bytes, "out_bytes": 0, "pool_in_bytes": 0},
        "limit_bytes": 2 * GIB,
        **more,
    }


def rival_cells(**by_rival: list[dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """Three rounds of job "j" at 50 %; without a limit it takes 10, 20 and 40 s."""
    cells = {
        Cell("j", plan.WHOLE, plan.UNLIMITED, number): result(5.0 * 2**number)
        for number in (1, 2, 3)
    }
    for rival, results in by_rival.items():
        for number, found in enumerate(results, start=1):
            cells[Cell("j", 50, rival, number)] = found
    return cells


def rivals_of(cells: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    found = summary.summarize(cells, [("j", "the job", "does things")])
    rivals: dict[str, Any] = found["j"]["shares"]["50"]["rivals"]
    return rivals


# ---------------------------------------------------------------------------- planning


def test_a_round_goes_job_by_job_and_each_begins_without_a_limit() -> None:
    cells = plan.cells_of_round(["a", "b"], [50, 25], [plan.DISK, plan.OURS], {"b"}, 2)
    assert [(cell.job, cell.share, cell.rival) for cell in cells[:5]] == [
        ("a", 100, plan.UNLIMITED),
        ("a", 50, plan.OURS),
        ("a", 50, plan.DISK),
        ("a", 25, plan.OURS),
        ("a", 25, plan.DISK),
    ]
    assert [cell.job for cell in cells] == ["a"] * 5 + ["b"] * 5
    assert {cell.round for cell in cells} == {2}


def test_only_jobs_that_can_spill_by_themselves_do() -> None:
    cells = plan.cells_of_round(["a", "b"], [50], plan.RIVALS, {"b"}, 1)
    assert [cell.job for cell in cells if cell.rival == plan.SPILL] == ["b"]
    assert len(cells) == 2 * (1 + len(plan.RIVALS)) - 1


def test_time_left_comes_from_the_most_similar_cells() -> None:
    took_s = {
        Cell("a", 50, plan.DISK, 1): 30.0,
        Cell("a", 50, plan.OURS, 1): 10.0,
        Cell("b", 100, plan.UNLIMITED, 1): 2.0,
    }
    assert plan.estimate_s(Cell("a", 50, plan.DISK, 2), took_s) == 30.0
    assert plan.estimate_s(Cell("a", 50, plan.ZRAM, 1), took_s) == 20.0
    assert plan.estimate_s(Cell("b", 25, plan.ZRAM, 1), took_s) == 2.0
    assert plan.estimate_s(Cell("c", 25, plan.ZRAM, 1), took_s) == 14.0
    assert plan.estimate_s(Cell("c", 25, plan.ZRAM, 1), {}) > 0
    cells = [Cell("a", 50, plan.DISK, 1), Cell("a", 50, plan.DISK, 2)]
    assert plan.left_s(cells, took_s) == 30.0


def test_another_round_begins_only_when_it_fits_the_budget() -> None:
    took_s = {Cell("a", 50, plan.DISK, 1): 30.0}
    second = [Cell("a", 50, plan.DISK, 2)]
    assert plan.fits_budget(second, took_s, 60.0)
    assert not plan.fits_budget(second, took_s, 59.0)
    assert plan.fits_budget([Cell("a", 50, plan.DISK, 1)], took_s, 30.0)


# ------------------------------------------------------------------------------ resuming

CELL = Cell("a", 50, plan.DISK, 1)
IDENTITIES = {"a": {"commit": "c0ffee", "size": 1.0}}


def test_finished_cells_are_found_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "cells.jsonl", IDENTITIES)
    assert ledger.load() == {}
    ledger.append(CELL, {"status": plan.OK})
    assert Ledger(tmp_path / "cells.jsonl", IDENTITIES).load() == {CELL: {"status": plan.OK}}


@pytest.mark.parametrize("changed", [{"commit": "decade"}, {"size": 2.0}])
def test_cells_of_another_commit_or_size_do_not_count(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = tmp_path / "cells.jsonl"
    Ledger(path, IDENTITIES).append(CELL, {"status": plan.OK})
    assert Ledger(path, {"a": {**IDENTITIES["a"], **changed}}).load() == {}
    assert Ledger(path, {}).load() == {}


def test_a_torn_line_spoils_neither_what_is_before_nor_what_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    ledger = Ledger(path, IDENTITIES)
    ledger.append(CELL, {"status": plan.OK})
    whole = path.read_bytes()
    later = Cell("a", 50, plan.DISK, 2)
    for size in range(1, len(whole)):
        path.write_bytes(whole + whole[:size])
        ledger.append(later, {"status": plan.TIMEOUT})
        assert set(ledger.load()) == {CELL, later}


# ----------------------------------------------------------------------------- accounting

STAT = "812 (a ) b) S 2 0 0 0 -1 2129984 0 0 0 0 250 50 0 0 20 0 1 0 777 0 0"


def test_processor_time_is_read_whatever_a_thread_is_called() -> None:
    found = parse_stat(STAT)
    assert found == ProcessTimes("a ) b", 2, 3.0, 777)
    assert parse_stat("") is None
    assert parse_stat("812 (a) S 2") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kswapd0", "kswapd"),
        ("loop7", "loop"),
        ("kworker/u16:3-loop7", "loop"),
        ("kworker/u16:3+loop7", "loop"),
        ("kworker/0:1-events", "kworker"),
        ("ksoftirqd/3", "softirq"),
        ("jbd2/vda-8", "other"),
    ],
)
def test_kernel_threads_are_told_apart(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def write_stat(proc: Path, pid: int, name: str, ticks: int, *, parent: int = 2) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    text = f"{pid} ({name}) S {parent} 0 0 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 {pid} 0 0"
    (proc / str(pid) / "stat").write_text(text)


def test_what_was_before_does_not_count_and_what_vanishes_stays_counted(tmp_path: Path) -> None:
    times = BusyTimes(kernel_thread_kind, proc=tmp_path)
    write_stat(tmp_path, 10, "kswapd0", 100)
    write_stat(tmp_path, 11, "python", 100, parent=1)
    times.sample()
    write_stat(tmp_path, 10, "kswapd0", 300)
    write_stat(tmp_path, 11, "python", 900, parent=1)
    write_stat(tmp_path, 12, "kworker/u8:1-loop3", 50)
    times.sample()
    (tmp_path / "12" / "stat").unlink()
    times.sample()
    assert times.totals() == {"kswapd": pytest.approx(2.0), "loop": pytest.approx(0.5)}


def test_known_processes_are_looked_at_alone(tmp_path: Path) -> None:
    times = BusyTimes(kernel_thread_kind, proc=tmp_path)
    write_stat(tmp_path, 10, "kswapd0", 100)
    times.sample()
    write_stat(tmp_path, 10, "kswapd0", 300)
    write_stat(tmp_path, 12, "loop3", 50)
    times.sample_known()
    assert times.totals() == {"kswapd": pytest.approx(2.0)}


def test_what_zswap_serves_is_counted_as_paged_in() -> None:
    found = parse_vmstat({"pswpin": 3, "zswpin": 1, "pswpout": 2})
    assert (found.in_bytes, found.out_bytes, found.pool_in_bytes) == (4 * 4096, 2 * 4096, 4096)
    assert parse_vmstat({}).in_bytes == 0


def test_the_size_of_a_zram_pool_is_what_it_takes_not_what_it_holds() -> None:
    assert parse_mm_stat("  4096000  1000000  1200128 0 1300000 5 0 0 0\n") == 1_200_128
    assert parse_mm_stat("") == 0


def test_our_device_is_told_by_its_block_device() -> None:
    assert front_end(["/var/tmp/a", "/dev/loop3"]) == "FUSE"
    assert front_end(["/dev/ublkb0"]) == "ublk"
    assert front_end([]) == ""


# ----------------------------------------------------------------------- a cell's result

FIGURES: dict[str, Any] = {"busy_s": {"device": 1.0}, "memory": {}}


def launched(**changes: Any) -> str:
    told = {"elapsed_s": 3.0, "user_s": 1.0, "system_s": 0.5, "code": 0, "said": '{"check": 1}'}
    return json.dumps({**told, **changes})


def test_a_job_that_ended_well() -> None:
    found = judged("", launched(), 0, FIGURES)
    assert found["status"] == plan.OK
    assert found["check"] == 1
    assert found["elapsed_s"] == 3.0
    assert found["busy_s"] == {"job": 1.5, "device": 1.0}


@pytest.mark.parametrize(
    ("report", "oom_kills", "status"),
    [
        (None, 0, plan.FAILED),
        (None, 1, plan.KILLED),
        (launched(code=1), 0, plan.FAILED),
        (launched(code=1), 1, plan.KILLED),
        (launched(code=-9), 0, plan.KILLED),
        (launched(said="Segmentation fault"), 0, plan.FAILED),
    ],
)
def test_a_job_that_did_not(report: str | None, oom_kills: int, status: str) -> None:
    assert judged("", report, oom_kills, FIGURES)["status"] == status


def test_a_job_that_was_ended_keeps_the_reason() -> None:
    assert judged(plan.TIMEOUT, launched(code=-9), 0, FIGURES)["status"] == plan.TIMEOUT


def test_answers_may_differ_by_rounding_only() -> None:
    answer = {"q1": [3, 1.5], "q2": [10]}
    assert agrees(answer, {"q1": [3, 1.5 + 1e-12], "q2": [10]})
    assert not agrees(answer, {"q1": [3, 1.5 + 1e-6], "q2": [10]})
    assert not agrees(answer, {"q1": [4, 1.5], "q2": [10]})
    assert not agrees(answer, {"q1": [3], "q2": [10]})
    assert not agrees(answer, {"q1": [3, 1.5]})
    assert not agrees({"wrong": 0}, {"wrong": 1})


# ------------------------------------------------------------------------------- verdicts


def test_a_slowdown_compares_with_the_same_round() -> None:
    rivals = rivals_of(rival_cells(**{plan.DISK: [result(20.0), result(60.0), result(160.0)]}))
    assert rivals[plan.DISK]["slowdown"] == {"median": 3.0, "q1": 2.5, "q3": 3.5, "count": 3}


def test_a_servers_slowdown_is_its_lost_throughput() -> None:
    cells = {
        Cell("j", plan.WHOLE, plan.UNLIMITED, 1): result(ops_per_s=1000.0, p99_us=50.0),
        Cell("j", 50, plan.DISK, 1): result(ops_per_s=250.0, p99_us=900.0),
    }
    disk = rivals_of(cells)[plan.DISK]
    assert disk["slowdown"]["median"] == 4.0
    assert disk["p99_us"] == 900.0


def test_the_fastest_wins_and_overlapping_quartiles_tie() -> None:
    fast = [result(20.0), result(40.0), result(80.0)]
    slow = [result(40.0), result(80.0), result(160.0)]
    rivals = rivals_of(rival_cells(**{plan.OURS: fast, plan.DISK: slow}))
    assert (rivals[plan.OURS]["verdict"], rivals[plan.DISK]["verdict"]) == (summary.WIN, "")
    near = [result(19.0), result(42.0), result(81.0)]
    rivals = rivals_of(rival_cells(**{plan.OURS: fast, plan.DISK: near}))
    assert {rivals[name]["verdict"] for name in (plan.OURS, plan.DISK)} == {summary.TIE}


def test_nothing_wins_where_plain_swap_hardly_paged() -> None:
    little = result(20.0, paged_in_bytes=PEAK_BYTES // 2)
    rivals = rivals_of(rival_cells(**{plan.OURS: [result(15.0)], plan.DISK: [little]}))
    assert {rival["verdict"] for rival in rivals.values()} == {summary.TOO_SMALL}


def test_a_rival_on_a_slower_disk_is_no_measure_for_one_on_the_raw_disk() -> None:
    rivals = rivals_of(
        rival_cells(
            **{
                plan.OURS: [result(40.0)],
                plan.DISK: [result(20.0)],
                plan.OURS_CLOUD: [result(45.0)],
                plan.CLOUD: [result(90.0)],
            }
        )
    )
    wins = {name for name, rival in rivals.items() if rival["verdict"] == summary.WIN}
    assert wins == {plan.DISK, plan.OURS_CLOUD}


def test_the_only_one_that_got_to_the_end_wins() -> None:
    cells = {
        plan.DISK: [result(30.0)],
        plan.OURS_CLOUD: [result(30.0)],
        plan.CLOUD: [result(status=plan.TIMEOUT)],
    }
    rivals = rivals_of(rival_cells(**cells))
    assert rivals[plan.OURS_CLOUD]["verdict"] == summary.WIN
    assert rivals[plan.CLOUD]["verdict"] == plan.TIMEOUT
    assert rivals[plan.DISK]["verdict"] == ""  # there was nobody to win against


def test_what_compresses_into_the_limit_fits_and_does_not_win() -> None:
    cells = {plan.OURS: [result(20.0)], plan.DISK: [result(30.0)], plan.ZRAM: [result(11.0)]}
    rivals = rivals_of(rival_cells(**cells))
    assert rivals[plan.ZRAM]["verdict"] == summary.FITS
    assert rivals[plan.OURS]["verdict"] == summary.WIN


@pytest.mark.parametrize("status", [plan.NO_ROOM, plan.KILLED, plan.TIMEOUT])
def test_what_does_not_is_said_not_to_fit(status: str) -> None:
    cells = {plan.DISK: [result(30.0)], plan.ZRAM: [result(status=status)]}
    zram = rivals_of(rival_cells(**cells))[plan.ZRAM]
    assert zram["verdict"] == summary.NO_FIT
    assert zram["slowdown"] is None


def test_zswap_fits_only_when_its_pool_served_nearly_all() -> None:
    def zswap(served: float) -> dict[str, Any]:
        paged = {"in_bytes": 1000, "out_bytes": 0, "pool_in_bytes": int(1000 * served)}
        return result(20.0) | {"paged": paged}

    for served, verdict in ((0.96, summary.FITS), (0.5, summary.WIN)):
        cells = {plan.DISK: [result(30.0)], plan.ZSWAP: [zswap(served)]}
        rivals = rivals_of(rival_cells(**cells))
        assert rivals[plan.ZSWAP]["verdict"] == verdict
        assert rivals[plan.DISK]["verdict"] == ""


def test_our_device_behind_zswap_is_a_rival_of_its_own() -> None:
    cells = {plan.OURS: [result(20.0)], plan.DISK: [result(30.0)], plan.OURS_ZSWAP: [result(15.0)]}
    rivals = rivals_of(rival_cells(**cells))
    assert rivals[plan.OURS_ZSWAP]["verdict"] == summary.WIN
    assert rivals[plan.OURS]["verdict"] == ""


def test_only_rivals_that_were_measured_have_a_column() -> None:
    cells = rival_cells(**{plan.OURS: [result(20.0)], plan.ZRAM: [result(30.0)]})
    found = summary.summarize(cells, [("j", "the job", "does things")])
    assert tables.overview(found).splitlines()[0] == "| job | memory | infiniswap | zram |"


def test_a_job_that_was_ended_was_at_least_that_slow() -> None:
    cells = {plan.DISK: [result(30.0)], plan.CLOUD: [result(400.0, status=plan.TIMEOUT)]}
    found = summary.summarize(rival_cells(**cells), [("j", "the job", "does things")])
    assert "| > 40.0 |" in tables.overview(found)
    assert plan.CLOUD not in tables.busy(found)


def test_a_wrong_answer_is_neither_hidden_by_good_rounds_nor_by_other_failures() -> None:
    bad = [result(20.0), result(status=plan.TIMEOUT), result(status=plan.WRONG)]
    cells = rival_cells(**{plan.OURS: bad, plan.DISK: [result(30.0)]})
    assert rivals_of(cells)[plan.OURS]["verdict"] == plan.WRONG
    assert summary.bad_answers(cells) == [Cell("j", 50, plan.OURS, 3)]


def test_processor_time_is_split_and_summed() -> None:
    cells = rival_cells(**{plan.OURS: [result(20.0)], plan.DISK: [result(30.0)]})
    found = summary.summarize(cells, [("j", "the job", "does things")])
    assert rivals_of(cells)[plan.OURS]["busy_s"] == {
        "job": 8.0,
        "device": 1.0,
        "donors": 0.5,
        "kernel": 0.75,
    }
    (line,) = [line for line in tables.busy(found).splitlines() if plan.OURS in line]
    assert line.endswith("| 8.00 | 1.00 | 0.500 | 0.750 | 10.2 |")


def test_every_table_says_under_what_it_was_measured() -> None:
    cells = rival_cells(**{plan.OURS: [result(20.0)] * 3, plan.DISK: [result(30.0)]})
    found = summary.summarize(cells, [("j", "the job", "does things")])
    about = {
        "machine": {"processor": "a processor", "processors": 4, "kernel": "6.18"},
        "cgroup_version": 1,
        "front_end": "FUSE",
        "commit": "c0ffee",
    }
    text = tables.everything(about, found)
    headings = text.count("\n## ")
    assert headings == 3  # no server was measured
    assert text.count("Donors on loopback, cgroup v1, front end FUSE; 1 to 3 rounds") == headings


# ----------------------------------------------------------------------------------- jobs


def test_every_job_has_every_size_and_its_programs() -> None:
    for job in JOBS.values():
        assert job.sizes[FULL] > job.sizes[QUICK] > job.sizes[TINY] > 0
        assert job.digest() != JOBS["pagerank"].digest() or job.key == "pagerank"
        assert "{" not in job.described(job.sizes[FULL])
