# SPDX-License-Identifier: Apache-2.0
"""The whole engine over TCP, beside a ping-pong of as many bytes and beside fio on nbdkit."""

from __future__ import annotations

from typing import Any

from infiniswap.units import PAGE_BYTES
from isw_bench.bench import Bench, Server, SkipError, fio, nbdkit_memory, our_donor
from isw_bench.children import cpu_s
from isw_bench.machine import find
from isw_bench.results import Comparison, Figure, Samples, at_least, at_most

KEY = "engine"
TITLE = "Engine: our load generator, engine and donor over TCP"

_HEADER_BYTES, _REPLY_BYTES = 28, 16  # of an NBD request and a simple reply
_DEPTH = 16

FLOOR, FLOOR_HOP, FLOOR_WRITE = "ping-pong", "ping-pong, receiver thread", "ping-pong, write"
OURS, ON_NBDKIT, FIO = "infiniswap", "our engine on nbdkit", "fio on nbdkit"


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: fio or nbdkit is missing.
    """
    for program in ("fio", "nbdkit"):
        if find(program) is None:
            raise SkipError(f"{program} is not installed")
    samples = Samples()
    size_bytes = bench.settings.donor_bytes
    with our_donor(bench, size_bytes) as ours, nbdkit_memory(bench, size_bytes) as theirs:
        fio(bench, theirs, rw="write", block_bytes=256 << 10, depth=4, fill=True)
        for _ in bench.rounds("engine"):
            bench.await_quiet()
            _floors(bench, samples)
            # What is compared with each other stands close together.
            for op, depth in (("read", 1), ("write", 1), ("write", _DEPTH), ("read", _DEPTH)):
                bench.await_quiet()
                _load(bench, samples, OURS, ours, op, depth)
                _load(bench, samples, ON_NBDKIT, theirs, op, depth)
            _fio(bench, samples, theirs)
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=_NOTES)


_NOTES = (
    "p50 of a request is the time from submit until the engine says that it is done, on the "
    "connection's receiver thread; a round trip ends when the thread that submitted it has woken.",
    "The ping-pong sends and receives on one thread, blocking. The one with a receiver thread has "
    "the same threads as the engine, so the difference to it is what the engine itself costs.",
    "The engine runs without a backup here: writes are done when the donor has acknowledged them.",
    "Depth 16 comes from one submitting thread.",
)


def _ms(bench: Bench) -> str:
    return str(round(bench.settings.seconds * 1000))


def _floors(bench: Bench, samples: Samples) -> None:
    page_request = [str(_HEADER_BYTES), str(PAGE_BYTES + _REPLY_BYTES)]
    for side, (request, reply), receiver in (
        (FLOOR_WRITE, [str(PAGE_BYTES + _HEADER_BYTES), str(_REPLY_BYTES)], "0"),
        (FLOOR_HOP, page_request, "1"),
        (FLOOR, page_request, "0"),
    ):
        argv = [bench.program("pingpong"), "--ms", _ms(bench), "--receiver", receiver]
        argv += ["--request-bytes", request, "--reply-bytes", reply]
        told = bench.json_of(side, argv)
        samples.add(
            side,
            p50_us=told["done_us"]["p50"],
            p99_us=told["done_us"]["p99"],
            round_p50_us=told["round_us"]["p50"],
            iops=told["iops"],
        )


def _load(bench: Bench, samples: Samples, side: str, server: Server, op: str, depth: int) -> None:
    argv = [bench.program("engine-load"), "--port", str(server.port), "--slots", "4"]
    argv += ["--slab-bytes", str(server.size_bytes // 4), "--op", op, "--depth", str(depth)]
    argv += ["--ms", _ms(bench), "--watch", str(server.pid)]
    argv += ["--ticket", server.export] if server.export else []
    told: dict[str, Any] = bench.json_of(f"{side}, {op}, depth {depth}", argv)
    if told["pages_not_from_donor"]:
        raise AssertionError(f"{told['pages_not_from_donor']} pages did not come from the donor")
    samples.add(
        side,
        **{
            f"{op}_d{depth}_p50_us": told["done_us"]["p50"],
            f"{op}_d{depth}_p99_us": told["done_us"]["p99"],
            f"{op}_d{depth}_round_p50_us": told["round_us"]["p50"],
            f"{op}_d{depth}_iops": told["iops"],
            f"{op}_d{depth}_cpu_us_per_page": told["cpu_us_per_page"],
            f"{op}_d{depth}_donor_cpu_us_per_page": told["watched_cpu_us_per_page"],
        },
    )


def _fio(bench: Bench, samples: Samples, server: Server) -> None:
    before_s = cpu_s(server.pid)
    result = fio(bench, server, rw="randread", block_bytes=PAGE_BYTES, depth=_DEPTH)
    used_s = cpu_s(server.pid) - before_s
    samples.add(
        FIO, iops=result.iops, p50_us=result.p50_us, cpu_us_per_page=used_s * 1e6 / result.requests
    )


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    ours = samples.values[OURS]

    def beside(name: str, side: str, other: str) -> tuple[list[float], list[float], str]:
        return ours[name], samples.of(side, other), side

    return [
        Figure(
            "4 KiB read, depth 1, p50",
            "µs",
            *beside("read_d1_p50_us", FLOOR, "p50_us"),
            target=at_most(1.25),
        ),
        Figure("4 KiB read, depth 1, p50", "µs", *beside("read_d1_p50_us", FLOOR_HOP, "p50_us")),
        Figure(
            "4 KiB read, depth 1, round trip",
            "µs",
            *beside("read_d1_round_p50_us", FLOOR_HOP, "round_p50_us"),
        ),
        Figure(
            "4 KiB write, depth 1, p50", "µs", *beside("write_d1_p50_us", FLOOR_WRITE, "p50_us")
        ),
        Figure(
            "4 KiB read, depth 16",
            "IOPS",
            *beside("read_d16_iops", FIO, "iops"),
            better="higher",
            target=at_least(3.0),
        ),
        Figure(
            "4 KiB read, depth 16",
            "IOPS",
            *beside("read_d16_iops", ON_NBDKIT, "read_d16_iops"),
            better="higher",
        ),
        Figure(
            "4 KiB write, depth 16",
            "IOPS",
            *beside("write_d16_iops", ON_NBDKIT, "write_d16_iops"),
            better="higher",
        ),
        Figure(
            "donor CPU, reads, depth 16",
            "µs/page",
            *beside("read_d16_donor_cpu_us_per_page", ON_NBDKIT, "read_d16_donor_cpu_us_per_page"),
            target=at_most(0.6),
        ),
        Figure(
            "donor CPU, reads, depth 16",
            "µs/page",
            *beside("read_d16_donor_cpu_us_per_page", FIO, "cpu_us_per_page"),
        ),
        Figure(
            "donor CPU, reads, depth 1",
            "µs/page",
            *beside("read_d1_donor_cpu_us_per_page", ON_NBDKIT, "read_d1_donor_cpu_us_per_page"),
        ),
        Figure(
            "donor CPU, writes, depth 16",
            "µs/page",
            *beside(
                "write_d16_donor_cpu_us_per_page", ON_NBDKIT, "write_d16_donor_cpu_us_per_page"
            ),
        ),
    ]
