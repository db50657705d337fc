# SPDX-License-Identifier: Apache-2.0
"""In a run of everything, some rooms run in other pytests beside the rest: tests wait for disks,
peers and timeouts much of the time."""

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

ROOMS = (("integration",), ("c", "fuzz", "unit"))
"""Of each of them: the first waits most of the time, the second has work for a processor."""
_NICE = 5
_BESIDE = pytest.StashKey[int]()


def is_wanted(config: pytest.Config) -> bool:
    """Whether this run is of everything and nobody watches the tests' terminal."""
    option = config.option
    is_watched = option.usepdb or option.capture == "no" or option.collectonly
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return is_whole and not is_watched and len(os.sched_getaffinity(0)) > 1


def is_beside(item: pytest.Item) -> bool:
    """Whether another pytest of this run has the test."""
    return _BESIDE in item.stash


class Beside:
    """The plugin of such a run."""

    def __init__(self) -> None:
        self._rooms: dict[int, Rooms] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests beside come last, so that they have run when they are asked for."""
        for item in items:
            top = item.config.rootpath / "tests"
            for number, rooms in enumerate(ROOMS):
                if any(top / room in item.path.parents for room in rooms):
                    item.stash[_BESIDE] = number
                    # Its bound holds in the other pytest; here, one waits for those before it.
                    item.add_marker(pytest.mark.timeout(0), append=False)
        items.sort(key=is_beside)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if session.testsfailed:
            return
        for number, rooms in enumerate(ROOMS):
            own = [item.nodeid for item in session.items if item.stash.get(_BESIDE, -1) == number]
            if own:
                self._rooms[number] = Rooms(rooms, own, session.config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._rooms or not is_beside(item):
            return None
        pass_on(item, self._rooms[item.stash[_BESIDE]].reports(item.nodeid))
        return True

    def pytest_sessionfinish(self) -> None:
        for rooms in self._rooms.values():
            rooms.close()


class Rooms:
    """Rooms that one other pytest runs, begun at once; another one goes on when it dies at a test.

    Args:
        names: of the rooms.
        nodeids: their tests, in their order.
        config: of this pytest.
    """

    def __init__(self, names: Sequence[str], nodeids: list[str], config: pytest.Config) -> None:
        self._names = names
        self._nodeids = nodeids
        self._config = config
        self._others = [begin(names, nodeids, config)]  # the last one runs

    def reports(self, nodeid: str) -> list[pytest.TestReport]:
        """A test's reports, when it has run."""
        others = self._others
        other = next((one for one in others if one.has(nodeid)), others[-1])
        reports = other.reports(nodeid)
        if not other.has(nodeid):
            after = self._nodeids[self._nodeids.index(nodeid) + 1 :]
            rest = [nodeid for nodeid in after if not any(one.has(nodeid) for one in others)]
            if rest:
                others.append(begin(self._names, rest, self._config))
        return reports

    def close(self) -> None:
        """Ends what runs."""
        for other in self._others:
            other.close()


def begin(names: Sequence[str], nodeids: Sequence[str], config: pytest.Config) -> OtherPytest:
    """Another pytest on this machine, for tests of these rooms."""
    share = Path(tempfile.mkdtemp(prefix="infiniswap-tests-"))
    choose(share, nodeids)
    rooms = [str(path) for room in names if (path := config.rootpath / "tests" / room).exists()]
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *rooms]
    argv = [*at_nice(_NICE), *commands.dying_with_us(*argv)]
    environ = {**os.environ, REPORTS: str(share)}
    return OtherPytest(argv, nodeids, share, environ=environ, config=config)
