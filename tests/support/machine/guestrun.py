# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of tests/vm/guest in virtual machines, and reports each as if it had run here.

Outside: the tests are collected as usual (so -k, -x and node ids work), but they run in a machine
that is booted for all of the same kind. When a machine dies, the test that it was at fails with
what the kernel said, and another one is booted for the rest.

The first machine runs beside the tests of this host, which wait for disks and peers much of the
time; it has what they leave of the processors.

Inside (INFINISWAP_VM is set): the tests simply run.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from qemu_vm import commands, kernels, plan

from infiniswap.errors import InfiniswapError
from support.machine.elsewhere import REPORTS, OtherPytest, report_of
from support.machine.priority import LOWEST
from support.machine.runmode import FULL, IN_CI, IN_GUEST

ROOT = Path(__file__).resolve().parents[3]
GUEST_TESTS = ROOT / "tests" / "vm" / "guest"
TEST_S_MAX = 900
"""A test's own bound in a guest, unless its `timeout` marker says otherwise."""
_RUN_S_MAX = 6 * 3600


@dataclass(frozen=True, slots=True)
class Kind:
    """What sort of machines a test needs: tests of one kind share a boot."""

    kernel: str
    hosts: int = 1
    memory: str = "1G"
    cpus: int | None = None


def remote(item: pytest.Item) -> bool:
    """Whether it is a test that runs in a guest, and this is not one. To be skipped none boots."""
    if not FULL and item.get_closest_marker("full") is not None:
        return False
    return not IN_GUEST and GUEST_TESTS in item.path.parents


def kind_of(item: pytest.Item) -> Kind:
    """From its parameter `vm_kernel` and its marker `machine`."""
    callspec = getattr(item, "callspec", None)
    kernel = callspec.params.get("vm_kernel", kernels.DEFAULT) if callspec else kernels.DEFAULT
    mark = item.get_closest_marker("machine")
    return Kind(kernel, **(mark.kwargs if mark else {}))


def put_together(items: list[pytest.Item]) -> None:
    """Tests of one kind follow each other, in the places of those that run in guests: only one
    kind of machine is up at a time. The one with most tests comes first: it runs beside all tests
    that need no machine."""
    places = [place for place, item in enumerate(items) if remote(item)]
    counts = Counter(kind_of(items[place]) for place in places)
    kinds = [kind for kind, _ in counts.most_common()]
    found = sorted((items[place] for place in places), key=lambda one: kinds.index(kind_of(one)))
    for place, item in zip(places, found, strict=True):
        items[place] = item


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


def parameters_of(marker: pytest.Mark | None, *, full: bool) -> list[Any]:
    """`kernels_of`, for parametrize: never none, as pytest would make a test without a kernel of
    it. What runs on other kernels only is there, for full runs; in a guest, nobody asks for it."""
    return kernels_of(marker, full=full) or [
        pytest.param(name, marks=pytest.mark.full) for name in (marker.args if marker else ())
    ]


class Guest(OtherPytest):
    """Machines that run tests, booted once.

    Args:
        kind: of the machines.
        nodeids: the tests, in their order.
        config: of this pytest.
        low: whether others of this session's tests run meanwhile.
    """

    what = "the machine"
    end_signal = signal.SIGTERM

    def __init__(self, kind: Kind, nodeids: list[str], config: pytest.Config, *, low: bool) -> None:
        self.kind = kind
        share = Path(tempfile.mkdtemp(prefix="infiniswap-vm-tests-"))
        argv = [str(ROOT / "tools/vm"), "--kernel", kind.kernel, "--hosts", str(kind.hosts)]
        argv += ["--memory", kind.memory, "--share", str(share)]
        argv += ["--timeout", str(_RUN_S_MAX), "--env", f"{REPORTS}=/run/vm/share"]
        argv += ["--cpus", str(kind.cpus)] if kind.cpus else []
        argv += ["--", sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        argv += ["-o", f"timeout={TEST_S_MAX}", *nodeids]
        argv = [*(LOWEST if low else ()), *commands.dying_with_us(*argv)]
        super().__init__(argv, nodeids, share, hosts=kind.hosts, config=config)


class GuestRuns:
    """The guests of one pytest run: one at a time, as each takes a processor and memory.

    Args:
        config: of this pytest.
        items: all tests of the run. The guest of the first that needs one begins now.
    """

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        self._config = config
        self._items = [item for item in items if remote(item)]
        self._guests: dict[Kind, Guest] = {}
        self._running: Guest | None = None
        self._done: set[str] = set()
        self._why_none: dict[str, str] = {}
        if self._items and not self._missing(kind := kind_of(self._items[0])):
            self._begin(kind, low=len(self._items) < len(items))

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Waits until it has run; its guest runs everything that is of its kind."""
        kind = kind_of(item)
        if why := self._missing(kind):
            if IN_CI or FULL:  # a full run promises everything
                return [report_of(item.nodeid, "failed", f"this run must have it: {why}")]
            return [report_of(item.nodeid, "skipped", why)]
        guest = self._guests.get(kind)
        if guest is None or guest.is_lost:
            guest = self._begin(kind, low=False)
        guest.hurry()
        reports = guest.reports(item.nodeid)
        self._done.add(item.nodeid)
        return reports

    def go_on(self) -> None:
        """Begins the next kind's guest as soon as the one before has ended: while other tests
        run, not only when pytest comes to the first that needs it."""
        if self._running is None or not self._running.is_done():
            return
        self._running = None
        kinds = dict.fromkeys(kind_of(item) for item in self._items)
        for kind in kinds:
            if kind not in self._guests and not self._missing(kind):
                self._begin(kind, low=True)
                return

    def _begin(self, kind: Kind, *, low: bool) -> Guest:
        if self._running is not None and not self._running.is_done():
            self._guests.pop(self._running.kind).close()
        if kind in self._guests:
            self._guests.pop(kind).close()
        nodeids = [
            item.nodeid
            for item in self._items
            if item.nodeid not in self._done and kind_of(item) == kind
        ]
        self._running = self._guests[kind] = Guest(kind, nodeids, self._config, low=low)
        return self._running

    def close(self) -> None:
        """Ends the machines that run."""
        for guest in self._guests.values():
            guest.close()
        self._guests.clear()
        self._running = None

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
