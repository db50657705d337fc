# SPDX-License-Identifier: Apache-2.0
"""A consumer: a device on six donors, its backup on a disk, and a job that swaps there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from infiniswap.errors import DeadlineError
from isw_bench import areas
from isw_bench.bench import Bench
from isw_bench.cluster import Device, device
from isw_bench.faults.donors import Donors, donors
from isw_bench.faults.timeline import Run
from isw_bench.swapped import check_swapped, swapped_on

BACKUPS: tuple[tuple[str, Any], ...] = (
    (areas.CLOUD, areas.limited_disk),
    (areas.DISK, areas.whole_disk),
)
"""Where the consumer's backup lies: a disk of 3000 requests and 125 MB/s, and this machine's."""

SLICE_S = 0.1
_FILL_S_MAX = 300.0
_REST_S_MAX = 60.0
_REST_S = 0.6


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of a running job.

    Attributes:
        start_s: when it began, of time.monotonic().
    """

    start_s: float

    def now_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.start_s

    def wait_until(self, at_s: float) -> None:
        """Returns at that second of the run."""
        time.sleep(max(0.0, at_s - self.now_s()))


Script = Callable[[Clock], list[float]]
"""What happens while the job runs; returns at which seconds it did."""


def nothing(_clock: Clock) -> list[float]:
    """A run without a fault."""
    return []


class Consumer:
    """A device, and jobs that swap to it one after the other.

    Args:
        bench: programs and sizes.
        pool: its donors.
        own: its device.
    """

    def __init__(self, bench: Bench, pool: Donors, own: Device) -> None:
        self._bench = bench
        self.pool = pool
        self.device = own

    def run(self, script: Script, *, seed: int, calm_s: float = 0.0) -> tuple[Run, dict[str, Any]]:
        """Runs the job, and the script beside it.

        Args:
            script: what happens to it.
            seed: of the places it touches: the same for both runs of a pair.
            calm_s: for how long it does not work at its peak.

        Returns:
            The run, and everything the job printed.
        """
        bench, settings = self._bench, self._bench.settings
        bench.await_quiet()
        self._rest()
        area = areas.area_of(bench, self.device)
        with swapped_on(bench, area) as cgroup:
            argv = [bench.program("timeline"), "--cgroup", str(cgroup.path)]
            argv += ["--bytes", str(settings.swap_bytes), "--seed", str(seed)]
            argv += ["--run-ms", str(round(settings.seconds * 1000))]
            argv += ["--calm-ms", str(round(calm_s * 1000))]
            argv += ["--slice-ms", str(round(SLICE_S * 1000))]
            with bench.running("job", argv) as child:
                child.line(_FILL_S_MAX)
                check_swapped(bench, area)
                area.settle()
                child.tell("")
                started = child.line(_FILL_S_MAX).removeprefix("running ")
                events = script(Clock(int(started) / 1e9))
                told = child.answer(settings.seconds + _FILL_S_MAX)
        return Run(SLICE_S, told["ops"], events), told

    def _rest(self) -> None:
        """Until slabs that have got another donor are filled: the work of the run before."""
        end_s = time.monotonic() + _REST_S_MAX
        before = -1
        while time.monotonic() < end_s:
            pages = self.device.status()["pages_on_donors"]
            if pages == before:
                return
            before = pages
            time.sleep(_REST_S)
        raise DeadlineError("the slabs' new donors are not filled")


@contextlib.contextmanager
def consumer(bench: Bench, backup: Any, module: str = "infiniswap") -> Iterator[Consumer]:
    """A consumer on six donors.

    Args:
        bench: programs and sizes.
        backup: one of BACKUPS.
        module: what runs as `daemon`.
    """
    size_bytes, slab_bytes = bench.settings.swap_device_bytes, bench.settings.slab_bytes
    with (
        backup(bench) as volume,
        donors(bench, module) as pool,
        device(bench, pool.addresses, size_bytes, slab_bytes, "--backup", str(volume.path)) as own,
    ):
        yield Consumer(bench, pool, own)
