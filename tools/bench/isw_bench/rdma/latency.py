# SPDX-License-Identifier: Apache-2.0
"""One page after the other."""

from __future__ import annotations

from infiniswap.units import PAGE_BYTES
from isw_bench.bench import Bench
from isw_bench.rdma import perftest
from isw_bench.rdma.place import place
from isw_bench.rdma.sides import OURS, donor, load
from isw_bench.results import Comparison, Figure, Samples, at_most

KEY = "latency"
TITLE = "RDMA: one page after the other, our engine and perftest"

READ, READ_EVENTS = "ib_read_lat", "ib_read_lat -e"
WRITE = "ib_write_lat"
ACKED = "ib_write_bw -t 1"
_FACTOR = 1.3
"""Wanted beside whatever perftest can do; which of its ways is the fast one depends on the host."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: there is no RDMA, or no perftest.
    """
    samples = Samples()
    with place(bench) as at, donor(bench, at) as to:

        def ours(op: str) -> int:
            bench.await_quiet()
            told = load(bench, at, to, op)
            done = told["done_us"]
            samples.add(
                OURS,
                **{
                    f"{op}_p50_us": done["p50"],
                    f"{op}_p99_us": done["p99"],
                    f"{op}_mean_us": done["mean"],
                    f"{op}_round_p50_us": told["round_us"]["p50"],
                },
            )
            return int(done["count"])

        def theirs(side: str, program: str, count: int, events: bool = False) -> None:
            found = perftest.latency(bench, at, program, PAGE_BYTES, count, events=events)
            samples.add(side, p50_us=found.p50_us, p99_us=found.p99_us, mean_us=found.mean_us)

        for _ in bench.rounds(KEY):
            # As many as ours got done in the time.
            count = ours("read")
            theirs(READ, READ, count)
            theirs(READ_EVENTS, READ, count, events=True)
            count = ours("write")
            theirs(WRITE, WRITE, count)
            mb_per_s = perftest.mb_per_s(bench, at, "ib_write_bw", PAGE_BYTES, count, depth=1)
            samples.add(ACKED, mean_us=PAGE_BYTES / mb_per_s)
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=_NOTES)


_NOTES = (
    "Ours is the whole engine: a page's checksum, for a write the copy into staging, the post, the "
    "completion, which wakes the receiver thread, for a read the copy into the request's buffer. "
    "It ends when the request is done, a round trip when the thread that submitted it has woken.",
    "perftest polls all the time, and sleeps until a completion with -e, which it has for reads "
    "only. Ours looks for a while that adapts, 20 µs at most, and sleeps then.",
    "ib_write_lat is the time until the bytes are there, half of a ping-pong of two WRITEs whose "
    "ends look at their memory. A page-out must know that they are: ours ends with the completion, "
    "as does ib_write_bw with one WRITE under way (mean: size / bandwidth).",
)


def figures(samples: Samples) -> list[Figure]:
    """The table."""

    def line(
        name: str, key: str, side: str, other: str = "p50_us", target: float | None = None
    ) -> Figure:
        return Figure(
            name,
            "µs",
            samples.of(OURS, key),
            samples.of(side, other),
            side,
            target=None if target is None else at_most(target),
        )

    return [
        line("4 KiB read, p50", "read_p50_us", READ, target=_FACTOR),
        line("4 KiB read, p50", "read_p50_us", READ_EVENTS, target=_FACTOR),
        line("4 KiB read, round trip, p50", "read_round_p50_us", READ_EVENTS),
        line("4 KiB read, p99", "read_p99_us", READ, "p99_us"),
        line("4 KiB write, p50", "write_p50_us", WRITE, target=_FACTOR),
        line("4 KiB write, p99", "write_p99_us", WRITE, "p99_us"),
        line("4 KiB write, until done, mean", "write_mean_us", ACKED, "mean_us", _FACTOR),
    ]
