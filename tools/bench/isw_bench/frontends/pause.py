# SPDX-License-Identifier: Apache-2.0
"""What a program sees when the process behind its block device dies."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from isw_bench.bench import Bench, SkipError, require_root
from isw_bench.cluster import donors
from isw_bench.frontends import sides
from isw_bench.frontends.reader import Reader
from isw_bench.frontends.sides import Side
from isw_bench.results import Comparison, Figure, Samples
from isw_bench.stats import quantile

KEY = "pause"
TITLE = "Death of the device's process: how long a page is waited for"

OURS = ("ublk", "nbd", "fuse")
PEERS = ((sides.NBDKIT, sides.nbdkit), (sides.NBDFUSE, sides.nbdfuse))
_TAKE_OVER_S = 300.0
_STEADY_S = 2.0
"""A process that dies within a second of its take-over counts as one of a crash loop, whose
successors are kept waiting on purpose (docs/recovery.md)."""
_MS = "longest_ms"


def run(bench: Bench) -> Comparison:
    """Measures it; a round is a kill.

    Raises:
        SkipError: not root.
    """
    require_root("a block device")
    sides.load_drivers()
    samples, notes = Samples(), list(_NOTES)
    for name in OURS:
        try:
            with (
                donors(bench, 2, sides.SLAB_BYTES, bench.settings.swap_device_bytes) as addresses,
                sides.ours(bench, name, addresses, standby=True) as side,
                reading(bench, side) as reader,
            ):
                for number in bench.rounds(f"{KEY}, {name}"):
                    samples.add(name, **{_MS: succeeded(bench, side, reader, number)})
        except SkipError as error:
            notes.append(f"{name} was left out: {error}.")
            continue
        pauses = samples.of(name, _MS)
        notes.append(
            f"{name}: {len(pauses)} kills, no read failed; the longest read took "
            f"{quantile(pauses, 0.5):.1f} ms (median), {max(pauses):.1f} ms at most."
        )
    for name, make in PEERS:
        try:
            ends = [orphaned(bench, make) for _ in bench.rounds(f"{KEY}, {name}")]
        except SkipError as error:
            notes.append(f"{name} was left out: {error}.")
            continue
        notes.append(f"{name}: {', '.join(f'{n} × {end}' for end, n in counted(ends))}.")
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


_NOTES = (
    "One thread reads pages at random, one at a time, past the page cache; the process behind the "
    "device gets SIGKILL. The longest of the reads from then until the successor serves and "
    "another thousand reads are done is the pause.",
)


@contextlib.contextmanager
def reading(bench: Bench, side: Side) -> Iterator[Reader]:
    """A reader that has begun."""
    reader = Reader(side.path, side.size_bytes)
    try:
        bench.until(lambda: reader.reads > 0 or reader.error, "the first read")
        yield reader
    finally:
        with bench.scope.interrupts.hold():
            reader.close()


def succeeded(bench: Bench, side: Side, reader: Reader, number: int) -> float:
    """One kill and what it cost the reader, in ms.

    Raises:
        OSError: a read failed.
        DeadlineError: nobody took over.
    """
    take_overs = side.take_overs
    assert take_overs is not None
    time.sleep(_STEADY_S)
    reader.forget()
    side.kill()
    bench.until(lambda: reader.error or take_overs() >= number, "a take-over", _TAKE_OVER_S)
    enough = reader.reads + 1000
    bench.until(lambda: reader.error or reader.reads >= enough, "reads", _TAKE_OVER_S)
    if reader.error is not None:
        raise reader.error
    return reader.longest_s * 1e3


def orphaned(bench: Bench, make: Callable[[Bench], AbstractContextManager[Side]]) -> str:
    """What a reader is told by a device whose process was killed."""
    with make(bench) as side, reading(bench, side) as reader:
        side.kill()
        bench.until(lambda: reader.error, "an error", _TAKE_OVER_S)
        number = reader.error.errno if reader.error else None
        return f"reads fail for good ({errno.errorcode.get(number or 0, number)})"


def counted(values: Sequence[str]) -> list[tuple[str, int]]:
    """Each different one, and how often."""
    return [(value, values.count(value)) for value in sorted(set(values))]


def figures(samples: Samples) -> list[Figure]:
    """The front ends beside the one that waits for a timeout."""
    measured = [name for name in OURS if samples.has(name)]
    return [
        Figure(
            f"{name}: pause",
            "ms",
            samples.of(name, _MS),
            samples.of("nbd", _MS),
            "nbd",
            our_name=name,
        )
        for name in measured
        if name != "nbd" and "nbd" in measured
    ]
