# SPDX-License-Identifier: Apache-2.0
"""In a run of everything, some rooms run in a second pytest beside the others: tests wait for
disks, peers and timeouts much of the time."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from qemu_vm import commands

from support.machine.elsewhere import REPORTS, OtherPytest, choose, pass_on
from support.machine.priority import at_nice

ROOMS = ("c", "fuzz", "integration", "unit")
_NICE = 5
_IS_BESIDE = pytest.StashKey[bool]()


def is_wanted(config: pytest.Config) -> bool:
    """Whether this run is of everything and nobody watches the tests' terminal."""
    option = config.option
    is_watched = option.usepdb or option.capture == "no" or option.collectonly
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return is_whole and not is_watched and len(os.sched_getaffinity(0)) > 1


def is_beside(item: pytest.Item) -> bool:
    """Whether another pytest of this run has the test."""
    return item.stash.get(_IS_BESIDE, False)


class Beside:
    """The plugin of such a run."""

    def __init__(self) -> None:
        self._nodeids: list[str] = []
        self._others: list[OtherPytest] = []  # the last one runs; those before died at a test

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests beside come last, so that they have run when they are asked for."""
        for item in items:
            if any(item.config.rootpath / "tests" / room in item.path.parents for room in ROOMS):
                item.stash[_IS_BESIDE] = True
                # Its bound holds in the other pytest; here, one waits for those before it.
                item.add_marker(pytest.mark.timeout(0), append=False)
        items.sort(key=is_beside)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        self._nodeids = [item.nodeid for item in session.items if is_beside(item)]
        if self._nodeids and not session.testsfailed:
            self._others.append(begin(self._nodeids, session.config))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._others or not is_beside(item):
            return None
        pass_on(item, self._reports(item))
        return True

    def _reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        others = self._others
        other = next((one for one in others if one.has(item.nodeid)), others[-1])
        reports = other.reports(item.nodeid)
        if not other.has(item.nodeid):
            after = self._nodeids[self._nodeids.index(item.nodeid) + 1 :]
            rest = [nodeid for nodeid in after if not any(one.has(nodeid) for one in others)]
            if rest:
                others.append(begin(rest, item.config))
        return reports

    def pytest_sessionfinish(self) -> None:
        for other in self._others:
            other.close()


def begin(nodeids: Sequence[str], config: pytest.Config) -> OtherPytest:
    """A second pytest on this machine."""
    share = Path(tempfile.mkdtemp(prefix="infiniswap-tests-"))
    choose(share, nodeids)
    rooms = [str(path) for room in ROOMS if (path := config.rootpath / "tests" / room).exists()]
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *rooms]
    argv = [*at_nice(_NICE), *commands.dying_with_us(*argv)]
    environ = {**os.environ, REPORTS: str(share)}
    return OtherPytest(argv, nodeids, share, environ=environ, config=config)
