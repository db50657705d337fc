# SPDX-License-Identifier: Apache-2.0
"""As much as goes through one connection."""

from __future__ import annotations

from infiniswap.units import KIB
from isw_bench.bench import Bench
from isw_bench.rdma import perftest
from isw_bench.rdma.place import place
from isw_bench.rdma.sides import OURS, donor, load
from isw_bench.results import Comparison, Figure, Samples, at_least

KEY = "bandwidth"
TITLE = "RDMA: 64 KiB requests, our engine and perftest"

_SIZE_BYTES = 64 * KIB
WRITE, READ, READ_EVENTS = "ib_write_bw", "ib_read_bw", "ib_read_bw -e"


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: there is no RDMA, or no perftest.
    """
    samples = Samples()
    depth = bench.settings.depth
    with place(bench) as at, donor(bench, at) as to:

        def ours(op: str) -> int:
            bench.await_quiet()
            told = load(bench, at, to, op, request_bytes=_SIZE_BYTES, depth=depth)
            samples.add(OURS, **{op: told["iops"] * _SIZE_BYTES / 1e6})
            return int(told["requests"])

        def theirs(side: str, program: str, count: int, events: bool = False) -> None:
            found = perftest.mb_per_s(
                bench, at, program, _SIZE_BYTES, count, depth=depth, events=events
            )
            samples.add(side, mb_per_s=found)

        for _ in bench.rounds(KEY):
            count = ours("write")
            theirs(WRITE, WRITE, count)
            count = ours("read")
            theirs(READ, READ, count)
            theirs(READ_EVENTS, READ, count, events=True)
    return Comparison(
        KEY, TITLE, figures(samples), samples.values, notes=[_NOTE.format(depth=depth)]
    )


_NOTE = (
    "{depth} requests under way on one connection, on both sides, as many in one run. Ours copies "
    "each into staging and takes its pages' checksums; perftest sends the same bytes again and "
    "again."
)


def figures(samples: Samples) -> list[Figure]:
    """The table."""

    def line(op: str, side: str, target: float | None = None) -> Figure:
        return Figure(
            f"64 KiB {op}",
            "MB/s",
            samples.of(OURS, op),
            samples.of(side, "mb_per_s"),
            side,
            better="higher",
            target=None if target is None else at_least(target),
        )

    return [line("write", WRITE, 0.9), line("read", READ), line("read", READ_EVENTS)]
