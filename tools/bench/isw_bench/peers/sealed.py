# SPDX-License-Identifier: Apache-2.0
"""What sealing pages costs: the same engine, and the same device, with it and without it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace

from infiniswap.units import MIB, PAGE_BYTES
from isw_bench import areas
from isw_bench.areas import Area
from isw_bench.bench import Bench, Server, our_donor
from isw_bench.cluster import device, donors
from isw_bench.peers.swapping import measure
from isw_bench.results import Comparison, Figure, Samples, at_most
from isw_bench.swapped import undisturbed

KEY = "seal"
TITLE = "Sealed pages: the engine, and a job that swaps, with sealing and without"

WITH, WITHOUT = "sealed", "not sealed"
READS = {1: 1.05, 8: 1.10, 32: 1.15}
"""Pages of a request, and the target of its time."""


def run(bench: Bench) -> Comparison:
    """Measures it; without root, the engine alone."""
    samples = Samples()
    with our_donor(bench, bench.settings.donor_bytes) as server:
        for _ in bench.rounds("seal, engine"):
            for op, pages in [("read", pages) for pages in READS] + [("write", 1)]:
                for side in (WITH, WITHOUT):
                    bench.await_quiet()
                    samples.add(side, **_load(bench, server, side, op, pages))
    notes = list(_NOTES)
    if os.geteuid() == 0:
        with _area(bench, WITH) as sealed, _area(bench, WITHOUT) as plain:
            for _ in bench.rounds("seal, swap"):
                for area in (sealed, plain):
                    told = undisturbed(bench, functools.partial(measure, bench, area))
                    samples.add(area.name, **{f"swap_{name}": told[name] for name in _SWAP})
    else:
        notes.append("The swapping job was left out: that takes root.")
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


_SWAP = ("fault_p50_us", "fault_mean_us", "sweep_mb_per_s", "fill_s")
_NOTES = (
    "Requests of one page, of 8 and of 32, one at a time, by our engine over TCP to one donor, "
    "until the request is done. Both sides compare each page: the one with its tag, the other with "
    "its checksum.",
)


def _load(bench: Bench, server: Server, side: str, op: str, pages: int) -> dict[str, float]:
    argv = [bench.program("engine-load"), "--port", str(server.port), "--slots", "4"]
    argv += ["--slab-bytes", str(server.size_bytes // 4), "--ticket", server.export]
    argv += ["--op", op, "--request-bytes", str(pages * PAGE_BYTES)]
    argv += ["--ms", str(round(bench.settings.seconds * 1000)), "--seal", str(int(side == WITH))]
    told = bench.json_of(f"{side}, {op} of {pages}", argv)
    return {
        f"{op}_{pages}_p50_us": told["done_us"]["p50"],
        f"{op}_{pages}_cpu_us_per_page": told["cpu_us_per_page"],
    }


@contextlib.contextmanager
def _area(bench: Bench, side: str) -> Iterator[Area]:
    """A device with two donors of its own, as `device start` makes it, every slab mapped."""
    size_bytes = bench.settings.swap_device_bytes
    slab_bytes = max(MIB, size_bytes // 16)
    changes = {"INFINISWAP_DEVICE_SEAL": "true" if side == WITH else "false"}
    name = side.replace(" ", "-")
    with (
        donors(bench, 2, slab_bytes, size_bytes) as addresses,
        device(bench, addresses, size_bytes, slab_bytes, changes=changes, name=name) as own,
    ):
        yield replace(areas.area_of(bench, own), name=side)


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    sealed, plain = samples.values[WITH], samples.values[WITHOUT]

    def figure(what: str, unit: str, name: str, most: float | None = None) -> Figure:
        target = at_most(most) if most else None
        return Figure(what, unit, sealed[name], plain[name], WITHOUT, our_name=WITH, target=target)

    found = [
        figure(f"{pages * PAGE_BYTES >> 10} KiB read, p50", "µs", f"read_{pages}_p50_us", most)
        for pages, most in READS.items()
    ]
    found.append(figure("4 KiB write, p50", "µs", "write_1_p50_us", 1.05))
    found += [
        figure(f"processor time, {op} of {pages}", "µs/page", f"{op}_{pages}_cpu_us_per_page")
        for op, pages in (("read", 1), ("read", 32), ("write", 1))
    ]
    if "swap_fill_s" in sealed:
        sweep = figure("sequential read-back", "MB/s", "swap_sweep_mb_per_s")
        found += [
            figure("random fault, p50", "µs", "swap_fault_p50_us", 1.05),
            figure("random fault, mean", "µs", "swap_fault_mean_us", 1.05),
            replace(sweep, better="higher"),
            figure("fill", "s", "swap_fill_s"),
        ]
    return found
