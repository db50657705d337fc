# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of tests/vm/guest in virtual machines, and reports each as if it had run here.

Outside: the tests are collected as usual (so -k, -x and node ids work), but instead of running the
first one a machine is booted that runs pytest with all that are for the same kind of machine. It
writes each report to a file on the share as soon as it has it; those are passed on, with their
tracebacks and captured output. When a machine dies, the test that it was at fails with what the
kernel said, and another one is booted for the rest.

Inside (INFINISWAP_VM is set): the tests simply run. This module then only writes the reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from qemu_vm import commands, kernels, plan

from infiniswap.errors import InfiniswapError

ROOT = Path(__file__).resolve().parents[1]
GUEST_TESTS = ROOT / "tests" / "vm" / "guest"
REPORTS = "INFINISWAP_VM_REPORTS"
IN_GUEST = os.environ.get("INFINISWAP_VM", "")
"""The kernel's name, such as "6.12"; empty outside."""

TEST_S_MAX = 900
"""A test's own bound in a guest, unless its `timeout` marker says otherwise."""
_RUN_S_MAX = 6 * 3600
_TICK_S = 0.1
_END_S = 60.0
_SHOWN = 6000


@dataclass(frozen=True, slots=True)
class Kind:
    """What sort of machines a test needs: tests of one kind share a boot."""

    kernel: str
    hosts: int = 1
    memory: str = "1G"
    cpus: int | None = None


def remote(item: pytest.Item) -> bool:
    """Whether it is a test that runs in a guest, and this is not one."""
    return not IN_GUEST and GUEST_TESTS in item.path.parents


def kind_of(item: pytest.Item) -> Kind:
    """From its parameter `vm_kernel` and its marker `machine`."""
    callspec = getattr(item, "callspec", None)
    kernel = callspec.params.get("vm_kernel", kernels.DEFAULT) if callspec else kernels.DEFAULT
    mark = item.get_closest_marker("machine")
    return Kind(kernel, **(mark.kwargs if mark else {}))


def kernels_of(marker: pytest.Mark | None, *, full: bool) -> list[str]:
    """Kernels that a test runs on: those of its marker `kernels`, all but the default one in full
    runs only; in a guest that guest's.

    Raises:
        ValueError: the marker names one that is not known.
    """
    named = list(marker.args) if marker else [kernels.DEFAULT]
    if unknown := set(named) - set(kernels.SUITES):
        raise ValueError(f"kernels {sorted(unknown)}: known are {list(kernels.SUITES)}")
    if IN_GUEST:
        return [name for name in named if name == IN_GUEST]
    return [name for name in named if full or name == kernels.DEFAULT]


# ---------------------------------------------------------------------------- inside


def write_report(entry: dict[str, Any]) -> None:
    """Adds a line to this machine's report file, where there is one."""
    if directory := os.environ.get(REPORTS):
        path = Path(directory) / f"{os.environ['INFINISWAP_VM_HOST']}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")


# ---------------------------------------------------------------------------- outside


class Guest:
    """Machines that run tests, booted once.

    Args:
        kind: of the machines.
        nodeids: the tests, in their order.
        config: of this pytest.
    """

    def __init__(self, kind: Kind, nodeids: list[str], config: pytest.Config) -> None:
        self.kind = kind
        self._config = config
        self._share = Path(tempfile.mkdtemp(prefix="infiniswap-vm-tests-"))
        self._files = [
            _Lines(self._share / f"h{number}.jsonl") for number in range(1, kind.hosts + 1)
        ]
        self._reports: dict[str, list[tuple[int, pytest.TestReport]]] = {}
        self._finished: dict[str, set[int]] = {}
        self._broken = ""
        argv = [str(ROOT / "tools/vm"), "--kernel", kind.kernel, "--hosts", str(kind.hosts)]
        argv += ["--memory", kind.memory, "--share", str(self._share)]
        argv += ["--timeout", str(_RUN_S_MAX), "--env", f"{REPORTS}=/run/vm/share"]
        argv += ["--cpus", str(kind.cpus)] if kind.cpus else []
        argv += ["--", sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        argv += ["-o", f"timeout={TEST_S_MAX}", *nodeids]
        self._log = (self._share / "log").open("w+b")
        self._process = subprocess.Popen(
            commands.dying_with_us(*argv),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def reports(self, nodeid: str) -> list[pytest.TestReport]:
        """A test's reports, when it has run; a failure when the machine has died.

        Every machine runs it; those of the first one are taken, and failures of the others.
        """
        while not self._has(nodeid):
            ended = self._process.poll() is not None
            self._read()
            if self._has(nodeid):
                break
            if ended:
                return [self._lost(nodeid)]
            time.sleep(_TICK_S)
        reports = self._reports.get(nodeid, [])
        return [report for host, report in reports if host == 0 or report.failed]

    def _has(self, nodeid: str) -> bool:
        return len(self._finished.get(nodeid, ())) == len(self._files)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come from it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends the machines and removes their files."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
        shutil.rmtree(self._share, ignore_errors=True)

    def _read(self) -> None:
        for number, file in enumerate(self._files):
            for entry in file.new():
                if "finished" in entry:
                    self._finished.setdefault(entry["finished"], set()).add(number)
                elif "broken" in entry:
                    self._broken += entry["broken"] + "\n"
                else:
                    self._take(number, entry)

    def _take(self, number: int, entry: dict[str, Any]) -> None:
        hook = self._config.hook.pytest_report_from_serializable
        report = hook(config=self._config, data=entry)
        assert isinstance(report, pytest.TestReport)
        if isinstance(report.longrepr, list):  # of a skipped test: a tuple, but not to JSON
            report.longrepr = tuple(report.longrepr)
        if len(self._files) > 1:
            report.sections.insert(0, ("machine", f"h{number + 1}"))
        self._reports.setdefault(report.nodeid, []).append((number, report))

    def _lost(self, nodeid: str) -> pytest.TestReport:
        log = (self._share / "log").read_text(errors="replace").strip()[-_SHOWN:]
        what = self._broken or f"the machine ended (status {self._process.returncode}):\n{log}"
        return report_of(nodeid, "failed", what)


class _Lines:
    """A file that grows: what is new in it, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield json.loads(line)


def report_of(nodeid: str, outcome: str, text: str) -> pytest.TestReport:
    """A report of a test that has not run."""
    longrepr: Any = text
    if outcome == "skipped":
        longrepr = (nodeid.partition("::")[0], 0, f"Skipped: {text}")
    location = (nodeid.partition("::")[0], 0, nodeid.partition("::")[2])
    when = "setup" if outcome == "skipped" else "call"  # else pytest would call it an error
    return pytest.TestReport(nodeid, location, {}, outcome, longrepr, when)  # type: ignore[arg-type]


@dataclass(slots=True)
class GuestRuns:
    """The guests of one pytest run: one at a time, as each takes a processor and memory.

    Attributes:
        in_ci: whether machines must be had.
    """

    config: pytest.Config
    in_ci: bool
    guest: Guest | None = None
    done: set[str] = field(default_factory=set)
    _why_none: dict[str, str] = field(default_factory=dict)

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Runs it, and everything after it that is of its kind."""
        kind = kind_of(item)
        if why := self._missing(kind):
            if self.in_ci:
                return [report_of(item.nodeid, "failed", f"CI must have it: {why}")]
            return [report_of(item.nodeid, "skipped", why)]
        if self.guest is not None and (self.guest.kind != kind or self.guest.ended):
            self.close()
        if self.guest is None:
            nodeids = [
                one.nodeid
                for one in item.session.items
                if remote(one) and one.nodeid not in self.done and kind_of(one) == kind
            ]
            self.guest = Guest(kind, nodeids, self.config)
        reports = self.guest.reports(item.nodeid)
        self.done.add(item.nodeid)
        return reports

    def close(self) -> None:
        """Ends the machine that runs."""
        if self.guest is not None:
            guest, self.guest = self.guest, None
            guest.close()

    def _missing(self, kind: Kind) -> str:
        """Why no machine with that kernel can be had here; asked once."""
        if kind.kernel not in self._why_none:
            try:
                plan.check_host()
                kernels.get(kind.kernel)
                self._why_none[kind.kernel] = ""
            except InfiniswapError as error:
                self._why_none[kind.kernel] = f"needs virtual machines: {error}"
        return self._why_none[kind.kernel]
