# SPDX-License-Identifier: Apache-2.0
"""Requests of a page through each front end."""

from __future__ import annotations

import contextlib

from infiniswap.units import KIB, PAGE_BYTES
from isw_bench.bench import Bench, FioTarget, SkipError, fio, require_root
from isw_bench.cluster import donors
from isw_bench.frontends import sides
from isw_bench.frontends.sides import Side
from isw_bench.results import Comparison, Figure, Samples

KEY = "speed"
TITLE = "Front ends: pages read and written directly"

OURS = ("ublk", "nbd", "fuse")
PEERS = (sides.NBDKIT, sides.NBDFUSE)

_RUN_S = 600.0
_FILL_BYTES = 64 * KIB

JOBS = (
    ("read_us", "randread", 1, "page read, depth 1, p50", "µs"),
    ("read_iops", "randread", 16, "pages read, depth 16", "1/s"),
    ("write_us", "randwrite", 1, "page written, depth 1, p50", "µs"),
    ("write_iops", "randwrite", 16, "pages written, depth 16", "1/s"),
)
"""Sample, pattern of fio, requests in flight, figure, unit."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root.
    """
    require_root("a block device")
    sides.load_drivers()
    samples, notes = Samples(), list(_NOTES)
    with contextlib.ExitStack() as stack:
        pool_bytes = len(OURS) * bench.settings.swap_device_bytes
        addresses = stack.enter_context(donors(bench, 2, sides.SLAB_BYTES, pool_bytes))
        made = {name: sides.ours(bench, name, addresses) for name in OURS}
        made |= {sides.NBDKIT: sides.nbdkit(bench), sides.NBDFUSE: sides.nbdfuse(bench)}
        ready: list[Side] = []
        for name, side in made.items():
            bench.say(f"{KEY}: setting up {name}")
            try:
                ready.append(stack.enter_context(side))
            except SkipError as error:
                notes.append(f"{name} was left out: {error}.")
        for one in ready:  # what was never written is no page of a peer's memory yet
            fio(
                bench, target(one), rw="write", block_bytes=_FILL_BYTES, depth=4, fill=True,
                timeout_s=_RUN_S,
            )  # fmt: skip
        for _ in bench.rounds(KEY):
            for key, pattern, depth, _, _ in JOBS:
                for one in ready:
                    bench.await_quiet()
                    samples.add(one.name, **{key: measure(bench, one, key, pattern, depth)})
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


_NOTES = (
    "fio with libaio and direct I/O, 4 KiB, at random, on the block device itself; all devices are "
    "there at the same time and take turns. Ours has two donors on loopback and writes a backup; "
    "nbdkit keeps everything in its own memory.",
)


def target(side: Side) -> FioTarget:
    """Its block device, past the page cache."""
    options = ["--ioengine=libaio", "--direct=1", f"--filename={side.path}"]
    return FioTarget(side.name, side.size_bytes, options)


def measure(bench: Bench, side: Side, key: str, pattern: str, depth: int) -> float:
    """Latency in µs (depth 1) or requests a second."""
    found = fio(
        bench, target(side), rw=pattern, block_bytes=PAGE_BYTES, depth=depth, timeout_s=_RUN_S
    )
    return found.p50_us if key.endswith("_us") else found.iops


def figures(samples: Samples) -> list[Figure]:
    """The table: each front end beside each peer, and the kernel's own beside FUSE."""
    found = []
    for key, _, _, name, unit in JOBS:
        for front_end in OURS:
            others = [*PEERS, *(["fuse"] if front_end != "fuse" else [])]
            for other in others:
                if not samples.has(front_end) or not samples.has(other):
                    continue
                found.append(
                    Figure(
                        f"{front_end}: {name}",
                        unit,
                        samples.of(front_end, key),
                        samples.of(other, key),
                        other,
                        better="lower" if key.endswith("_us") else "higher",
                        our_name=front_end,
                    )
                )
    return found
