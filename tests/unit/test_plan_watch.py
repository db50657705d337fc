# SPDX-License-Identifier: Apache-2.0
"""The watches of a plan's runs: how far a job has come, and when its limit is taken away."""

from __future__ import annotations

from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from infiniswap.device.jobs.summary import Summary
from infiniswap.planning.trials import Trial
from infiniswap.planning.watch import ProbeWatch, Reached, TrialWatch, WholeWatch, work_of
from infiniswap.system.block_trace import READ, WRITE, PageEvents
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.units import MIB, PAGE_BYTES

ALL = 1 << 40


def summary(elapsed_s: float, exit_code: int = 0, pages: int = 0) -> Summary:
    """Of a run."""
    known: dict[str, Any] = {
        "elapsed_s": elapsed_s,
        "exit_code": exit_code,
        "page_in_bytes": pages * PAGE_BYTES,
        "page_out_bytes": 2 * pages * PAGE_BYTES,
    }
    return Summary(**{field.name: known.get(field.name, 0) for field in fields(Summary)})


def whole(elapsed_s: float) -> WholeWatch:
    """A first run that used 64 MiB."""
    watch = WholeWatch()
    watch.progress = [Reached(elapsed_s, 1.0)]
    watch.user_s = 1.0
    watch.peak_bytes = 64 * MIB
    watch.ended(summary(elapsed_s))
    return watch


@pytest.fixture
def cgroup(tmp_path: Path) -> MemoryCgroup:
    """One without processes, that has 48 MiB in memory and 16 MiB on swap."""
    lines = [f"total_inactive_anon {48 * MIB}", f"total_swap {16 * MIB}", ""]
    (tmp_path / "memory.stat").write_text("\n".join(lines))
    (tmp_path / "memory.limit_in_bytes").write_text("")
    return MemoryCgroup(tmp_path, 1)


def limit(cgroup: MemoryCgroup) -> str:
    return (cgroup.path / "memory.limit_in_bytes").read_text()


def test_the_first_run_tells_the_peak_and_how_far_it_was(cgroup: MemoryCgroup) -> None:
    watch = WholeWatch()
    assert not watch.look(cgroup)
    assert watch.peak_bytes == 64 * MIB
    assert len(watch.progress) == 1


def test_a_probe_has_half_of_the_peak_and_keeps_it_while_there_is_time(
    cgroup: MemoryCgroup,
) -> None:
    watch = ProbeWatch(whole(1000.0), "/dev/nowhere", ALL)
    assert watch.limit_bytes == 32 * MIB
    assert not watch.look(cgroup)
    assert limit(cgroup) == ""
    assert watch.lifted is None


def test_a_run_that_has_lost_much_time_goes_on_without_a_limit(cgroup: MemoryCgroup) -> None:
    watch = ProbeWatch(whole(1e-9), "/dev/nowhere", ALL)
    watch.look(cgroup)
    lifted = watch.lifted
    assert lifted is not None
    assert limit(cgroup) == str(ALL)
    watch.look(cgroup)
    assert watch.lifted == lifted
    watch.ended(summary(1.0))
    assert watch.probe(None).is_cut


def test_a_run_that_loses_twice_as_much_is_ended(cgroup: MemoryCgroup) -> None:
    watch = ProbeWatch(whole(1e-9), "/dev/nowhere", ALL)
    assert any(watch.look(cgroup) for _ in range(3))
    watch.ended(summary(1.0))
    assert watch.problem == "was ended after 1.0 s, many times the job's own time"


@pytest.mark.parametrize(("slowdown", "loses"), [(1.1, 0.2), (1.5, 1.0)])
def test_a_trial_that_loses_twice_what_it_should_goes_on_without_a_limit(
    cgroup: MemoryCgroup, monkeypatch: pytest.MonkeyPatch, slowdown: float, loses: float
) -> None:
    watch = TrialWatch(whole(1000.0), 40 * MIB, ALL, slowdown)
    assert watch.limit_bytes == 40 * MIB
    at_s = 1000.0 + 1000.0 * loses
    for now_s, is_lifted in ((1.0, False), (at_s, False), (at_s + 2.0, True)):
        monkeypatch.setattr("time.monotonic", lambda now_s=now_s: now_s)
        assert not watch.look(cgroup)
        assert (watch.lifted is not None) == is_lifted
    watch.ended(summary(1500.0, pages=7))
    assert watch.trial() == Trial(40 * MIB, 1500.0, 7, is_lifted=True)


def test_a_trial_that_waits_where_the_job_always_waits_has_lost_nothing(
    cgroup: MemoryCgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = whole(1000.0)
    # It sleeps, and does all of its work in the last second.
    first.progress = [Reached(1.0, 0.0), Reached(999.0, 0.0), Reached(1000.0, 1.0)]
    watch = TrialWatch(first, 40 * MIB, ALL, 1.1)
    for now_s in (1.0, 500.0, 1190.0):
        monkeypatch.setattr("time.monotonic", lambda now_s=now_s: now_s)
        assert not watch.look(cgroup)
        assert watch.lifted is None


@pytest.mark.parametrize("slowdown", [1.1, 8.0, 100.0])
def test_a_trial_is_not_ended_before_it_has_lost_far_more_than_it_should(
    cgroup: MemoryCgroup, monkeypatch: pytest.MonkeyPatch, slowdown: float
) -> None:
    watch = TrialWatch(whole(1000.0), 40 * MIB, ALL, slowdown)
    ends_s = 1000.0 * (1.0 + max(10.0, 4.0 * (slowdown - 1.0)))
    for now_s, ends in ((1.0, False), (ends_s, False), (ends_s + 2.0, True)):
        monkeypatch.setattr("time.monotonic", lambda now_s=now_s: now_s)
        assert watch.look(cgroup) == ends


def test_the_quicker_of_two_runs_without_a_limit_counts() -> None:
    first, second = whole(30.0), whole(6.0)
    second.peak_bytes = 32 * MIB
    first.repeated(second)
    assert (first.elapsed_s, first.peak_bytes) == (6.0, 64 * MIB)
    assert first.time_at(1.0) == 6.0
    first.repeated(whole(9.0))
    assert first.elapsed_s == first.time_at(1.0) == 6.0


def test_a_job_that_is_gone_costs_no_look(cgroup: MemoryCgroup) -> None:
    watch = ProbeWatch(whole(1000.0), "/dev/nowhere", ALL)
    watch.look(cgroup)
    (cgroup.path / "memory.stat").unlink()
    watch.look(cgroup)
    watch.ended(summary(2000.0, pages=5))
    assert watch.problem == ""
    probe = watch.probe(None)
    assert len(probe.looks) == 1
    assert (probe.page_ins, probe.page_outs) == (5, 10)
    assert probe.share_limited == 1.0
    assert not probe.is_cut


def test_a_run_that_failed_tells_nothing(cgroup: MemoryCgroup) -> None:
    watch = ProbeWatch(whole(1000.0), "/dev/nowhere", ALL)
    watch.look(cgroup)
    assert watch.problem == "ended with its device"
    watch.ended(summary(2.0, exit_code=3))
    assert watch.problem == "ended with exit code 3"


def test_a_trace_with_gaps_counts_as_none(cgroup: MemoryCgroup) -> None:
    watch = ProbeWatch(whole(1000.0), "/dev/nowhere", ALL)
    watch.look(cgroup)
    watch.ended(summary(2000.0))
    times = array("Q", [1 << 62, (1 << 62) + 1])
    told = (times, array("B", [WRITE, READ]), array("Q", [7, 7]), 1)
    whole_trace, gaps = watch.probe(PageEvents(*told, 0)), watch.probe(PageEvents(*told, 9))
    assert len(whole_trace.found) == 1
    assert gaps.found == ()


def test_paging_takes_processor_time_that_is_no_work() -> None:
    assert work_of([2.0, 4.0], 4.0, 1.0, None) == [0.5, 1.0]


def test_what_ran_without_a_limit_is_measured_from_the_end() -> None:
    # 3 s for 0.6 s of work with a limit, then 0.4 s of work in as many.
    work = work_of([1.5, 3.0, 3.2, 3.4], 3.4, 1.0, 3.0)
    assert work == pytest.approx([0.3, 0.6, 0.8, 1.0])


def test_a_run_that_took_longer_without_a_limit_than_the_first_did_some_work_with_one() -> None:
    # 1 s, and then 2 s for what the first run did in 1 s: at least a fifth of an even share.
    assert work_of([1.0, 3.0], 3.0, 1.0, 1.0) == pytest.approx([1 / 15, 2 + 1 / 15])


def test_a_job_without_processor_time_has_done_no_work() -> None:
    assert work_of([0.0, 0.0], 0.0, 0.0, 0.0) == [0.0, 0.0]
