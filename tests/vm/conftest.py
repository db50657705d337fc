# SPDX-License-Identifier: Apache-2.0
"""Tests in virtual machines (docs/vm.md). What is in guest/ runs in them, as root:

@pytest.mark.kernels("6.12", "6.1")               # the default alone without; others in full runs
@pytest.mark.machine(memory="2G", hosts=2)        # what else the machine must be
@pytest.mark.needs_debs                           # TEST_DEBS is filled before it boots
"""

from __future__ import annotations

import contextlib

import pytest
from support.machine.beside import is_beside
from support.machine.elsewhere import pass_on
from support.machine.guestrun import GuestRuns, parameters_of, put_together, remote
from support.machine.runmode import FULL
from support.machine.wheels import make_test_debs

_RUNS = pytest.StashKey[GuestRuns]()


@pytest.hookimpl(tryfirst=True)  # ids begin with it, here and in the guest, whatever is collected
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "vm_kernel" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("kernels")
        metafunc.parametrize("vm_kernel", parameters_of(marker, full=FULL), indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if remote(item):
            # Its bound holds in the guest; here the first one waits for a boot as well.
            item.add_marker(pytest.mark.timeout(0), append=False)
    put_together(items)
    items.sort(key=lambda item: (is_beside(item), remote(item)))  # the rest runs meanwhile


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.option.collectonly and not session.testsfailed:
        marked = (remote(item) and item.get_closest_marker("needs_debs") for item in session.items)
        if FULL and any(marked):
            with contextlib.suppress(pytest.skip.Exception):  # the tests say that none is there
                make_test_debs(session.config.rootpath)
        session.stash[_RUNS] = runs = GuestRuns(session.config, session.items)
        session.config.pluginmanager.register(_GoesOn(runs))  # hears of tests elsewhere, too


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not remote(item):
        return None
    pass_on(item, item.session.stash[_RUNS].reports(item))
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if runs := session.stash.get(_RUNS, None):
        runs.close()


class _GoesOn:
    """Looks after each test whether the next machines can boot."""

    def __init__(self, runs: GuestRuns) -> None:
        self._runs = runs

    def pytest_runtest_logfinish(self) -> None:
        self._runs.go_on()
