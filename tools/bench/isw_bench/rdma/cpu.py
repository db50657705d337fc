# SPDX-License-Identifier: Apache-2.0
"""What a donor's processors spend on pages."""

from __future__ import annotations

from typing import Any

from infiniswap.units import GIB, PAGE_BYTES
from isw_bench.bench import Bench
from isw_bench.rdma.place import place
from isw_bench.rdma.sides import donor, load
from isw_bench.results import Comparison, Figure, Samples

KEY = "cpu"
TITLE = "Processor time per GiB served: RDMA and TCP"

RDMA, TCP = "RDMA", "TCP"
_DEPTH = 16
_VALUES = {
    "donor_s": ("watched_cpu_us_per_page", "donor's process"),
    "softirq_s": ("host_softirq_us_per_page", "host's softirq"),
    "kernel_s": ("host_kernel_us_per_page", "host's kernel, softirq included"),
    "host_s": ("host_busy_us_per_page", "host, programs included"),
}
"""Sample: field of engine_load, figure."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: there is no RDMA.
    """
    samples = Samples()
    with place(bench) as at, donor(bench, at) as to:
        for _ in bench.rounds(KEY):
            for op in ("read", "write"):
                bench.await_quiet()
                for side in (RDMA, TCP):
                    told = load(bench, at, to, op, transport=side.lower(), depth=_DEPTH)
                    samples.add(side, **per_gib(op, told))
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=_NOTES)


_NOTES = (
    "4 KiB requests, 16 under way, one connection. The donor's process is its store alone, so all "
    "of its time is that of its page threads.",
    "Consumer and donor are on one host here: what the host spends is for both ends, the "
    "consumer's engine included. Its times are counted in ticks of 10 ms.",
    "Soft-RoCE works in the donor's kernel: in softirq, in newer ones in kernel threads. A card "
    "does that itself.",
)


def per_gib(op: str, told: dict[str, Any]) -> dict[str, float]:
    """Seconds of processor time for a GiB of pages."""
    pages = GIB // PAGE_BYTES
    return {f"{op}_{key}": told[field] * pages / 1e6 for key, (field, _) in _VALUES.items()}


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    return [
        Figure(
            f"{name}, pages {past}",
            "s/GiB",
            samples.of(RDMA, f"{op}_{key}"),
            samples.of(TCP, f"{op}_{key}"),
            TCP,
            our_name=RDMA,
        )
        for key, (_, name) in _VALUES.items()
        for op, past in (("read", "read"), ("write", "written"))
    ]
