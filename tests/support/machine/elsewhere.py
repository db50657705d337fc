# SPDX-License-Identifier: Apache-2.0
"""Tests of this run that another pytest runs, in a guest or beside this one. It writes each report
to a file as soon as it has it; here they are passed on, with their tracebacks and captured output,
when this pytest comes to the test. When the other one dies, the test that it was at fails with what
it said.

There (INFINISWAP_TEST_REPORTS names the directory of that file), the tests simply run: of those
that are collected, the ones in the file `tests`, where there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.machine.priority import give_usual_share

REPORTS = "INFINISWAP_TEST_REPORTS"
_HOST = "INFINISWAP_VM_HOST"
_NAMES = "tests"
_TICK_S = 0.1
_END_S = 60.0
_SHOWN = 6000


# ------------------------------------------------------------------------------ there


def write_reports(config: pytest.Config) -> None:
    """From now on, where another pytest has asked for them. Not those of a pytest that a test
    runs."""
    if directory := os.environ.pop(REPORTS, ""):
        path = Path(directory) / f"{os.environ.get(_HOST, 'h1')}.jsonl"
        config.pluginmanager.register(_Writer(config, path))
        if (names := Path(directory) / _NAMES).exists():
            config.pluginmanager.register(_Chooser(json.loads(names.read_text())))


class _Chooser:
    """Leaves out all other tests."""

    def __init__(self, nodeids: Sequence[str]) -> None:
        self._nodeids = nodeids

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[nodeid] for nodeid in self._nodeids if nodeid in found]


class _Writer:
    """Tells the other pytest what has come of each test."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._write(hook(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write({"finished": nodeid})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"broken": f"{report.nodeid}: {report.longreprtext}"})

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")


# ------------------------------------------------------------------------------- here


def pass_on(item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
    """Reports a test as if it had run here."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        report.location = item.location
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def choose(share: Path, nodeids: Sequence[str]) -> None:
    """Has a pytest run these tests only. A file: pytest finds not every test by its name, and there
    may be more than fit into a command line."""
    (share / _NAMES).write_text(json.dumps(nodeids))


class OtherPytest:
    """A pytest that runs tests of this one, begun at once.

    Args:
        argv: of it. It may collect other tests as well, if `choose` was called.
        nodeids: the tests, in their order.
        share: a directory of its own for it, removed in the end. Its reports come there.
        hosts: machines on which it runs; each runs every test.
        environ: of it.
        config: of this pytest.
    """

    what = "the other pytest"
    end_signal = signal.SIGINT
    """After which it cleans up."""

    def __init__(
        self,
        argv: Sequence[str],
        nodeids: Sequence[str],
        share: Path,
        *,
        hosts: int = 1,
        environ: dict[str, str] | None = None,
        config: pytest.Config,
    ) -> None:
        self._nodeids = nodeids
        self._share = share
        self._config = config
        self._files = [_Lines(share / f"h{number}.jsonl") for number in range(1, hosts + 1)]
        self._reports: dict[str, list[tuple[int, pytest.TestReport]]] = {}
        self._finished: dict[str, set[int]] = {}
        self._broken = ""
        self.is_lost = False
        """It died at a test; those after that have not run."""
        self._log = (share / "log").open("w+b")
        self._process = subprocess.Popen(
            argv,
            cwd=config.rootpath,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def reports(self, nodeid: str) -> list[pytest.TestReport]:
        """A test's reports, when it has run; a failure when its pytest has died.

        Every machine runs it; those of the first one are taken, and failures of the others.
        """
        while not self.has(nodeid):
            ended = self._process.poll() is not None
            self._read()
            if self.has(nodeid):
                break
            if ended:
                self.is_lost = True
                return [self._lost(nodeid)]
            time.sleep(_TICK_S)
        reports = self._reports.get(nodeid, [])
        return [report for host, report in reports if host == 0 or report.failed]

    def hurry(self) -> None:
        """Gives it the usual share of the processors, for a caller that waits for it."""
        if self._process.poll() is None:
            give_usual_share(self._process.pid)

    def is_done(self) -> bool:
        """Whether it has ended and every test has run."""
        if self._process.poll() is None:
            return False
        self._read()
        return all(self.has(nodeid) for nodeid in self._nodeids)

    def has(self, nodeid: str) -> bool:
        """Whether the test had run at the last look."""
        return len(self._finished.get(nodeid, ())) == len(self._files)

    def close(self) -> None:
        """Ends it and removes its files."""
        if self._process.poll() is None:
            self._process.send_signal(self.end_signal)
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
        longrepr: object = report.longrepr
        if isinstance(longrepr, list):  # of a skipped test: a tuple, but not to JSON
            path, line, reason = longrepr
            report.longrepr = (path, line, reason)
        if len(self._files) > 1:
            report.sections.insert(0, ("machine", f"h{number + 1}"))
        self._reports.setdefault(report.nodeid, []).append((number, report))

    def _lost(self, nodeid: str) -> pytest.TestReport:
        log = (self._share / "log").read_text(errors="replace").strip()[-_SHOWN:]
        what = self._broken or f"{self.what} ended (status {self._process.returncode}):\n{log}"
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
