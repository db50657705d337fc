# SPDX-License-Identifier: Apache-2.0
"""A job that swaps to one area: its cgroup, and whether the pages went to that area."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from infiniswap.errors import SystemCallError
from infiniswap.system import swap
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.units import format_size_short
from isw_bench.areas import Area
from isw_bench.bench import Bench
from isw_bench.scope import PREFIX

_T = TypeVar("_T")
_SWAPOFF_S = 300.0
_TRIES = 4
_PAUSE_S = 5.0
_SWAPPED_MIN = 0.8
"""Of what cannot be in memory: below it another swap area has got the pages."""


class ElsewhereError(SystemCallError):
    """Another swap area of this host has got the pages."""


def undisturbed(bench: Bench, measure_once: Callable[[], _T]) -> _T:
    """Measures, and tries again when somebody else's swap area came in between."""
    for _ in range(_TRIES - 1):
        bench.await_quiet()
        try:
            return measure_once()
        except ElsewhereError as error:
            bench.say(f"swap: again: {error.what}")
            time.sleep(_PAUSE_S)
    return measure_once()


@contextlib.contextmanager
def swapped_on(bench: Bench, area: Area) -> Iterator[MemoryCgroup]:
    """The cgroup of a job that swaps to this area. The job is killed at the end."""
    with bench.scope.interrupts.hold():
        cgroup = create_memory_cgroup(
            f"{PREFIX}{bench.scope.mark}", bench.settings.swap_limit_bytes
        )
    try:
        with bench.scope.interrupts.hold():
            priority = swap.priority_above(swap.active_areas())
            swap.swapon(area.path, priority=priority, discard=False)
        yield cgroup
    finally:
        with bench.scope.interrupts.hold():
            cgroup.kill()
            swap.swapoff(area.path, timeout_s=_SWAPOFF_S)
            cgroup.remove()


def check_swapped(bench: Bench, area: Area) -> None:
    """Raises ElsewhereError when what cannot be in memory is not on this area."""
    swapped_bytes = swap.used_bytes(area.path)
    expected_bytes = bench.settings.swap_bytes - bench.settings.swap_limit_bytes
    if swapped_bytes < _SWAPPED_MIN * expected_bytes:
        raise ElsewhereError(
            f"only {format_size_short(swapped_bytes)} went to the swap area of {area.name}, "
            f"not {format_size_short(expected_bytes)}",
            mend="Another swap area of this host is preferred to ours: see /proc/swaps.",
        )
