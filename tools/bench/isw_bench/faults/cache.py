# SPDX-License-Identifier: Apache-2.0
"""A host that reads its cached files again, while somebody wants its memory."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.memory import cgroup_cache
from infiniswap.units import MIB, format_size_short
from isw_bench import cluster, paper
from isw_bench.bench import START_S, Bench, require_root
from isw_bench.faults import hosts, reader
from isw_bench.faults.consumer import SLICE_S
from isw_bench.faults.timeline import Run, lowest_per_s, per_s
from isw_bench.results import Comparison, Figure, Samples, TimeLine, at_least

KEY = "cache"
TITLE = "Cache: a host re-reads cached files while its memory is wanted"

LENDS, ELSEWHERE = "this host lends", "another host lends"
FILE_SHARE = 1 / 3
"""Of the host's memory. With the headroom that leaves room for slabs, but not for all of it."""

_READ_S_MAX = 120.0


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root.
    """
    require_root("a host's memory cgroup")
    samples, lines = Samples(), list[TimeLine]()
    file = bench.work / "cached.bin"
    make_file(file, round(bench.settings.host_bytes * FILE_SHARE) // MIB * MIB)
    for _ in bench.rounds(KEY):
        for side in (ELSEWHERE, LENDS):
            bench.await_quiet()
            run, told = measure(bench, file, here=side == LENDS)
            half_s = bench.settings.seconds
            samples.add(
                side,
                mb_per_s=_mb(run.per_s),
                wanted_mb_per_s=_mb(per_s(run, 0.0, half_s)),
                after_mb_per_s=_mb(per_s(run, half_s)),
                lowest_mb_per_s=_mb(lowest_per_s(run)),
                **told,
            )
            lines.append(TimeLine("Cache", side, run.slice_s, run.ops, run.events))
    file.unlink()
    return Comparison(
        KEY, TITLE, figures(samples), samples.values, notes=notes(bench, samples), lines=lines
    )


def _mb(blocks_per_s: float) -> float:
    return blocks_per_s * reader.BLOCK_BYTES / 1e6


def make_file(path: Path, size_bytes: int) -> None:
    """A file on the disk, none of it in the cache."""
    with path.open("wb") as file:
        for _ in range(size_bytes // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Drops it from the cache, so that the next reader's host is charged for it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(bench: Bench, file: Path, *, here: bool) -> tuple[Run, dict[str, float]]:
    """One run. In its first half a consumer asks for all the memory that a host will give: this
    one, or another one like it."""
    seconds = 2 * bench.settings.seconds
    forget(file)
    with ExitStack() as stack:
        host = stack.enter_context(hosts.host(bench, "host"))
        other = host if here else stack.enter_context(hosts.host(bench, "other"))
        lending = stack.enter_context(hosts.lending(bench, other))
        argv = [sys.executable, "-m", "isw_bench.faults.reader", str(file)]
        argv += [f"{seconds:g}", f"{SLICE_S:g}"]
        job = stack.enter_context(bench.running("reader", argv, changes=cluster.environment(bench)))
        host.add(job.pid)
        job.tell("")
        job.line(_READ_S_MAX)
        job.tell("")
        before_bytes = refault_bytes(host)
        start_s = int(job.line(START_S).removeprefix("running ")) / 1e9
        lending.ask(start_s + seconds / 2, seconds)
        told = job.answer(seconds + START_S)
        hosts.check_alive(host)
        read_bytes = sum(told["ops"]) * reader.BLOCK_BYTES
        again_bytes = refault_bytes(host) - before_bytes
        return Run(SLICE_S, told["ops"], [seconds / 2]), {
            "cached_share": max(0.0, 1.0 - again_bytes / read_bytes),
            "again_mb": again_bytes / 1e6,
            "lent": lending.slabs,
            "evicted": lending.evictions,
        }


def refault_bytes(host: MemoryCgroup) -> int:
    """What was read from the disk again on this host; 0 where the kernel does not count it."""
    found = cgroup_cache(host.path, host.version)
    return 0 if found is None else found.refault_bytes


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    ours, theirs = samples.values[LENDS], samples.values[ELSEWHERE]
    bound = at_least(1.0 - paper.CACHE_LOST)

    def line(name: str, key: str, target: bool, unit: str = "MB/s") -> Figure:
        return Figure(
            name, unit, ours[key], theirs[key], ELSEWHERE, better="higher",
            target=bound if target else None, our_name=LENDS,
        )  # fmt: skip

    return [
        line("re-reading, the whole run", "mb_per_s", True),
        line("re-reading, while memory is asked for", "wanted_mb_per_s", False),
        line("re-reading, after that", "after_mb_per_s", True),
        line("worst second", "lowest_mb_per_s", False),
        line("read from the cache", "cached_share", False, "share"),
    ]


def notes(bench: Bench, samples: Samples) -> list[str]:
    """What one must know."""
    settings = bench.settings
    lent, evicted = samples.of(LENDS, "lent"), samples.of(LENDS, "evicted")
    again_mb = samples.of(LENDS, "again_mb")
    file_bytes = round(settings.host_bytes * FILE_SHARE)
    return [
        f"A host of {format_size_short(settings.host_bytes)} (a memory cgroup) that has "
        f"{format_size_short(file_bytes)} of files in its page cache and reads them over and over "
        f"for {2 * settings.seconds:g} s. In the first half of that a consumer wants as much "
        "memory as it can get: from this host, or, on the other side, from another one of that "
        "size on the same machine, so that both sides share their processors alike.",
        f"This host had lent {min(lent):.0f} to {max(lent):.0f} slabs of "
        f"{format_size_short(settings.slab_bytes)} at the end of a run; it had taken "
        f"{min(evicted):.0f} to {max(evicted):.0f} back.",
        f"{min(again_mb):.0f} to {max(again_mb):.0f} MB had to be read from the disk again, by the "
        "kernel's count (refaults). That is what lending costs once; the longer a host reads on, "
        "the smaller is its share.",
    ]
