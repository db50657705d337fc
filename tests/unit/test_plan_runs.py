# SPDX-License-Identifier: Apache-2.0
"""The runs of a plan, with a job that is only told of: what is concluded where one of them ends in
another way than the first."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infiniswap.cli.plan import runs
from infiniswap.cli.plan.runs import PlanRuns
from infiniswap.cli.run.job import Paging
from infiniswap.cli.run.request import RunRequest
from infiniswap.device.control import client
from infiniswap.device.jobs.sudo import User
from infiniswap.device.jobs.summary import Summary
from infiniswap.errors import ConflictError, UnavailableError
from infiniswap.planning.watch import Reached, WholeWatch
from infiniswap.units import MIB

ALL = 1 << 40
PEAK = 100 * MIB


class Host:
    """Runs a job that takes 10 s, 30 s with half of its memory, and 10.9 s with any other limit.

    Args:
        codes: exit codes of its runs, as long as there are any.
        lasts: the device answers before so many of the later runs.
    """

    def __init__(self, codes: tuple[int, ...] = (), lasts: int = 9) -> None:
        self._codes = list(codes)
        self._lasts = lasts
        self.limits: list[int] = []
        self.options: set[str] = set()

    def run_job(self, request: RunRequest, _paging: Paging) -> int:
        """In place of the one of `run`."""
        limit, watch = request.local_bytes, request.follower
        elapsed_s = 10.0 if limit == ALL else 30.0 if limit == PEAK // 2 else 10.9
        self.limits.append(limit)
        code = self._codes.pop(0) if self._codes else 0
        if isinstance(watch, WholeWatch):
            watch.progress = [Reached(elapsed_s, 1.0)]
            watch.peak_bytes = PEAK
            watch.options.given |= self.options
        pages = 0 if limit == ALL else 50_000
        known: dict[str, Any] = {
            "elapsed_s": elapsed_s,
            "exit_code": code,
            "anon_peak_bytes": PEAK,
            "page_in_bytes": pages * 4096,
            "page_out_bytes": pages * 4096,
        }
        found = Summary(**{field.name: known.get(field.name, 0) for field in fields(Summary)})
        assert watch is not None
        watch.ended(found)
        return code

    def status(self, _paths: object) -> Any:
        """In place of the device's."""
        self._lasts -= 1
        if self._lasts < 0:
            raise ConflictError("device swap0 does not run")
        return SimpleNamespace(path="/dev/null")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Plans on a host: the exit code, and the plan."""

    def plan(host: Host, user: User | None = None) -> tuple[int, Any]:
        def refused(_device: int) -> None:
            raise UnavailableError("no trace here")

        monkeypatch.setattr(runs, "run_job", host.run_job)
        monkeypatch.setattr(client, "status_patiently", host.status)
        monkeypatch.setattr(runs, "BlockTrace", refused)
        options = dict.fromkeys(runs._OPTIONS)
        args = Namespace(slowdown=1.1, allow_data_loss=False, **options)
        request = RunRequest(args, ["job"], user, False, ALL, None, WholeWatch())
        before: Any = SimpleNamespace(path="/dev/null")
        nothing: Any = None
        paging = Paging(nothing, before, nothing, nothing, False)
        found = PlanRuns(request, tmp_path / "history.json", has_donors=True)
        code = found.all(request, paging)
        return code, found.plan

    return plan


def test_a_limit_is_tried_before_it_is_recommended(planned: Any) -> None:
    host = Host()
    code, plan = planned(host)
    assert code == 0
    assert host.limits[:3] == [ALL, PEAK // 2, ALL]
    assert [trial.limit_bytes for trial in plan.tried] == host.limits[3:]
    assert plan.recommended.limit_bytes == host.limits[3]
    assert plan.recommended.slowdown == pytest.approx(1.09)


@pytest.mark.parametrize(
    ("lasts", "count", "words"),
    [
        (0, 1, "the run with half of the memory ended with its device"),
        (1, 2, "the second run without a limit ended with its device, so no limit was tried"),
        (2, 3, "ended with its device, so no other limit was tried"),
    ],
)
def test_what_a_device_told_before_it_ended_is_kept(
    planned: Any, lasts: int, count: int, words: str
) -> None:
    host = Host(lasts=lasts)
    code, plan = planned(host)
    assert code == 0
    assert len(host.limits) == count
    assert any("device swap0 does not run" in note for note in plan.notes)
    assert words in plan.notes[-1]
    assert plan.peak_bytes == PEAK
    assert bool(plan.curve) == (lasts > 0)


@pytest.mark.parametrize("runs_before", [1, 2, 3])
def test_a_later_run_that_is_interrupted_ends_the_plan_with_its_code(
    planned: Any, runs_before: int
) -> None:
    host = Host((0,) * runs_before + (130,))
    code, plan = planned(host)
    assert code == 130
    assert len(host.limits) == runs_before + 1
    assert "ended with exit code 130" in plan.notes[-1]


def test_a_later_run_that_fails_is_told(planned: Any) -> None:
    code, plan = planned(Host((0, 0, 0, 3)))
    assert code == 0
    assert "ended with exit code 3, so no other limit was tried" in plan.notes[-1]
    assert plan.recommended.remote_bytes == 0


def test_a_half_run_that_fails_ends_the_plan_with_its_code(planned: Any) -> None:
    code, plan = planned(Host((0, 134)))
    assert code == 134
    assert plan.curve == ()
    assert "half of the memory ended with exit code 134: no time is predicted" in plan.notes[-1]


def test_a_plan_under_sudo_names_a_command_with_sudo(planned: Any) -> None:
    assert planned(Host())[1].type.startswith("infiniswap run --local ")
    user = User("mary", 1000, 1000, (1000,), {})
    assert planned(Host(), user)[1].type.startswith("sudo infiniswap run --local ")


def test_a_peak_that_an_option_sets_is_the_options(planned: Any) -> None:
    host = Host()
    host.options = {"sort -S"}
    notes = planned(host)[1].notes
    assert any("the peak is that of the option sort -S" in note for note in notes)


def test_the_curve_has_the_limits_that_ran(planned: Any) -> None:
    host = Host()
    points = planned(host)[1].curve
    measured = [point.limit_bytes for point in points if point.source == "measured"]
    assert measured == [PEAK, *sorted(host.limits[3:], reverse=True), PEAK // 2]
