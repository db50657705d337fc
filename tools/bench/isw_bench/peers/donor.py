# SPDX-License-Identifier: Apache-2.0
"""A donor's store beside `nbdkit memory`, with the same client: fio."""

from __future__ import annotations

from infiniswap.units import PAGE_BYTES
from isw_bench.bench import Bench, Server, SkipError, fio, nbdkit_memory, our_donor
from isw_bench.children import cpu_s
from isw_bench.machine import find
from isw_bench.results import Comparison, Figure, Samples, at_least, at_most

KEY = "donor"
TITLE = "Donor: our store and nbdkit memory, fio's NBD engine"

_FILL_BLOCK_BYTES = 256 << 10
_JOBS = ((4096, 1), (65536, 1), (4096, 16), (65536, 16))
"""Block size in bytes, depth."""


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
        for server in (ours, theirs):
            fio(bench, server, rw="write", block_bytes=_FILL_BLOCK_BYTES, depth=4, fill=True)
        for _ in bench.rounds("donor"):
            for block_bytes, depth in _JOBS:
                bench.await_quiet()
                for server in (ours, theirs):
                    _measure(bench, samples, server, block_bytes, depth)
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=_NOTES)


_NOTES = (
    "Both servers are filled first, so nbdkit reads memory and not holes.",
    "Processor time is that of the server's process, by its own clock; with TCP over loopback each "
    "side also does part of the other's work in the kernel.",
)


def _measure(bench: Bench, samples: Samples, server: Server, block_bytes: int, depth: int) -> None:
    before_s = cpu_s(server.pid)
    result = fio(bench, server, rw="randread", block_bytes=block_bytes, depth=depth)
    used_s = cpu_s(server.pid) - before_s
    pages = result.requests * block_bytes / PAGE_BYTES
    prefix = f"b{block_bytes}_d{depth}"
    samples.add(
        server.name,
        **{
            f"{prefix}_p50_us": result.p50_us,
            f"{prefix}_p99_us": result.p99_us,
            f"{prefix}_iops": result.iops,
            f"{prefix}_mb_per_s": result.mb_per_s,
            f"{prefix}_cpu_us_per_page": used_s * 1e6 / pages,
        },
    )


def figures(samples: Samples) -> list[Figure]:
    """The table."""

    def pair(name: str) -> tuple[list[float], list[float], str]:
        return samples.of("infiniswap", name), samples.of("nbdkit memory", name), "nbdkit"

    return [
        Figure("4 KiB read, depth 1, p50", "µs", *pair("b4096_d1_p50_us"), target=at_most(0.75)),
        Figure("4 KiB read, depth 1, p99", "µs", *pair("b4096_d1_p99_us"), target=at_most(1.0)),
        Figure(
            "64 KiB read, depth 1",
            "MB/s",
            *pair("b65536_d1_mb_per_s"),
            better="higher",
            target=at_least(1.5),
        ),
        Figure("64 KiB read, depth 16", "MB/s", *pair("b65536_d16_mb_per_s"), better="higher"),
        Figure("4 KiB read, depth 16", "IOPS", *pair("b4096_d16_iops"), better="higher"),
        Figure("server CPU, depth 1", "µs/page", *pair("b4096_d1_cpu_us_per_page")),
        Figure("server CPU, depth 16", "µs/page", *pair("b4096_d16_cpu_us_per_page")),
    ]
