# SPDX-License-Identifier: Apache-2.0
"""The runs of a plan, on one device: two without a limit, one with half of the memory, and those
with the limits that are tried."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from dataclasses import replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Final

from infiniswap.cli.run.job import Paging
from infiniswap.cli.run.job import run as run_job
from infiniswap.cli.run.live_line import say
from infiniswap.cli.run.request import RunRequest
from infiniswap.device.control import client
from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.planning import history
from infiniswap.planning.prediction import Point, Probe, fit, measured
from infiniswap.planning.report import Planned
from infiniswap.planning.trials import TRIALS_MAX, LimitSearch, Trial, curve
from infiniswap.planning.watch import (
    LIMIT_BYTES_MIN,
    LimitedWatch,
    ProbeWatch,
    TrialWatch,
    WholeWatch,
)
from infiniswap.system.block_trace import BlockTrace
from infiniswap.units import MIB, format_size_short

_SHORT_S: Final = 1.0
_UNSURE: Final = 0.5
_UNSURE_NOTE: Final = (
    "the run with half of the memory moved too few pages to tell what a page costs this job: the "
    "times rest on earlier plans on this host, or on 60 µs a page where there are none"
)
_SHORT_NOTE: Final = (
    f"the command ended within {_SHORT_S:g} s, too soon to predict a time: with the memory above "
    "as its limit nothing is paged out"
)
_ALONE_NOTE: Final = "no donor is named or announced: this is the curve with the local disk alone"
_PAGED_NOTE: Final = "a run without a limit was paged out, too: this host is short of memory"
_BY_SIGNAL: Final = frozenset(128 + number for number in (SIGHUP, SIGINT, SIGQUIT, SIGTERM))
_LOWEST: Final = 25
"""Percent of the peak: no limit below it is recommended."""
_OPTIONS: Final = (
    *("config", "donors", "secret_file", "frontend", "backup", "transport", "slab", "tenant"),
    *("staging", "size", "device"),
)
"""That `run` has, too, and that the command to type repeats."""


class PlanRuns:
    """Of one plan.

    Args:
        request: of the first run.
        past: file of the history.
        has_donors: whether any are named.

    Attributes:
        plan: the result; None: the device has gone.
    """

    def __init__(self, request: RunRequest, past: Path, has_donors: bool) -> None:
        self._request = request
        self._past = past
        self._has_donors = has_donors
        self._notes: list[str] = []
        self._ended_code = 0
        self.plan: Planned | None = None

    def all(self, request: RunRequest, paging: Paging) -> int:
        """Runs the job a few times; returns the exit code of the first run, of one with half of
        its memory that failed, or of a later one that was interrupted."""
        whole = request.follower
        assert isinstance(whole, WholeWatch)
        say("plan: run 1, without a limit")
        code = run_job(request, paging)
        if whole.summary is None:
            return code
        first_s = whole.summary.elapsed_s
        if not self._has_donors:
            self._notes.append(_ALONE_NOTE)
        search: LimitSearch | None = None
        probe: Probe | None = None
        if code:
            self._notes.append(f"the command ended with exit code {code}: no time is predicted")
        elif first_s < _SHORT_S:
            self._notes.append(_SHORT_NOTE)
        else:
            probe = self._probe(request, paging, whole)
        if probe is not None:
            is_whole = self._repeat(request, paging, whole)
            search = self._search(whole, probe)
            if is_whole:
                self._try(request, paging, whole, search)
        self._notes += [
            f"the peak is that of the option {option}: with a smaller value there the command "
            "itself takes less memory"
            for option in sorted(whole.options.given)
        ]
        if whole.swap_peak_bytes:
            self._notes.append(_PAGED_NOTE)
        self.plan = self._made(code, first_s, whole, probe, search)
        return code or self._ended_code

    def _repeat(self, request: RunRequest, paging: Paging, whole: WholeWatch) -> bool:
        """Another run without a limit, right before those that are compared with it: the first
        one waits for files that are not cached yet, and on a virtual machine for memory that its
        host has not given it yet. Returns whether it came to a good end."""
        say("plan: run 3, without a limit again")
        watch = WholeWatch()
        self._again(replace(request, follower=watch), paging)
        if problem := watch.problem:
            self._notes.append(f"the second run without a limit {problem}, so no limit was tried")
            return False
        whole.repeated(watch)
        return True

    def _again(self, request: RunRequest, paging: Paging) -> None:
        """A file at standard input is read from its beginning. What ends a run, ends the plan with
        what the runs before have told."""
        if stat.S_ISREG(os.fstat(0).st_mode):
            os.lseek(0, 0, os.SEEK_SET)
        try:
            status = client.status_patiently(paging.paths)
            code = run_job(request, replace(paging, before=status))
        except UsageError:
            raise
        except InfiniswapError as error:
            self._notes.append(f"no other run could be made: {error}")
        else:
            self._ended_code = code if code in _BY_SIGNAL else 0

    def _limited(self, request: RunRequest, paging: Paging, watch: LimitedWatch) -> None:
        self._again(replace(request, follower=watch, local_bytes=watch.limit_bytes), paging)

    def _probe(self, request: RunRequest, paging: Paging, whole: WholeWatch) -> Probe | None:
        watch = ProbeWatch(whole, paging.before.path, request.local_bytes)
        say(f"plan: run 2, with half of its memory: {watch.limit_bytes // MIB} MiB")
        trace: BlockTrace | None = None
        with contextlib.ExitStack() as stack:
            try:
                trace = stack.enter_context(BlockTrace(Path(paging.before.path).stat().st_rdev))
            except (InfiniswapError, OSError) as error:
                self._notes.append(
                    f"the curve is taken to be even, as pages cannot be seen: {error}"
                )
            self._limited(request, paging, watch)
        if problem := watch.problem:
            self._notes.append(f"the run with half of the memory {problem}: no time is predicted")
            if watch.summary is not None and not watch.cut:
                self._ended_code = watch.summary.exit_code
            return None
        probe = watch.probe(None if trace is None else trace.events())
        if probe.is_cut:
            self._notes.append(
                f"only {probe.share_limited:.0%} of the job's work ran with half of its memory: "
                "what the rest would have paged in is not counted"
            )
        return probe

    def _search(self, whole: WholeWatch, probe: Probe) -> LimitSearch:
        elapsed_s, peak = whole.elapsed_s, whole.peak_bytes
        past = history.read(self._past)
        model = fit(elapsed_s, peak, probe, past, held_bytes=whole.held_bytes)
        try:
            history.add(self._past, measured(elapsed_s, probe))
        except InfiniswapError as error:
            self._notes.append(f"later plans will not know what a page costs here: {error}")
        if model.from_history > _UNSURE and model.at(probe.limit_bytes).page_ins:
            self._notes.append(_UNSURE_NOTE)
        lowest_bytes = max(peak * _LOWEST // 100, LIMIT_BYTES_MIN) // MIB * MIB
        return LimitSearch(model, self._request.args.slowdown, lowest_bytes)

    def _try(
        self, request: RunRequest, paging: Paging, whole: WholeWatch, search: LimitSearch
    ) -> None:
        slowdown = self._request.args.slowdown
        while (limit_bytes := search.next_bytes()) is not None:
            number = len(search.tried) + 4
            say(f"plan: run {number} of at most {TRIALS_MAX + 3}, with {limit_bytes // MIB} MiB")
            watch = TrialWatch(whole, limit_bytes, request.local_bytes, slowdown)
            self._limited(request, paging, watch)
            if problem := watch.problem:
                limit = format_size_short(limit_bytes)
                self._notes.append(f"the run with {limit} {problem}, so no other limit was tried")
                return
            search.note(watch.trial())

    def _made(
        self,
        code: int,
        first_s: float,
        whole: WholeWatch,
        probe: Probe | None,
        search: LimitSearch | None,
    ) -> Planned:
        args = self._request.args
        model = search.model if search else None
        best = search.recommended() if search else None
        return Planned(
            command=shlex.join(self._request.command),
            exit_code=code,
            elapsed_s=model.elapsed_s if model else whole.elapsed_s,
            first_elapsed_s=first_s,
            peak_bytes=whole.peak_bytes,
            probe_limit_bytes=probe.limit_bytes if probe else None,
            probe_elapsed_s=probe.elapsed_s if probe else 0.0,
            probe_is_cut=probe.is_cut if probe else False,
            probe_page_ins=probe.page_ins if probe else 0,
            probe_share=probe.share_limited if probe else 0.0,
            page_us=model.page_s * 1e6 if model else 0.0,
            from_history=model.from_history if model else 1.0,
            slowdown=args.slowdown,
            recommended=best,
            type=_to_type(self._request, best.limit_bytes) if best else "",
            curve=_curve(probe, search) if probe and search else (),
            tried=search.tried if search else (),
            notes=self._notes,
        )


def _curve(probe: Probe, search: LimitSearch) -> tuple[Point, ...]:
    half = Trial(probe.limit_bytes, probe.elapsed_s, probe.page_ins, probe.is_cut)
    return curve(search.model, (half, *search.tried))


def _to_type(request: RunRequest, limit_bytes: int) -> str:
    """The command, with sudo where the user typed that for the plan."""
    args = request.args
    options = [
        word
        for name in _OPTIONS
        if (value := getattr(args, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    if args.allow_data_loss:
        options.append("--allow-data-loss")
    local = f"{-(-limit_bytes // 2**20)}M"
    head = ["sudo"] if request.user is not None else []
    head += ["infiniswap", "run", "--local", local, *options]
    return shlex.join([*head, "--", *request.command])
