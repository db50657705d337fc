# SPDX-License-Identifier: Apache-2.0
"""An application that grows into memory that its host has lent."""

from __future__ import annotations

import csv
import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infiniswap.errors import SystemCallError
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.units import format_size_short
from isw_bench import paper
from isw_bench.bench import START_S, Bench, SkipError, require_root
from isw_bench.faults import hosts
from isw_bench.machine import find
from isw_bench.results import Comparison, Figure, Samples, at_least, at_most

KEY = "host"
TITLE = "Host: Redis grows into memory that its host has lent"

LENDS, KEEPS = "lends", "lends nothing"
GROWTH_SHARE = 0.5
"""Of the host's memory: much more than its headroom."""

_VALUE_BYTES = 1000
_KEY_BYTES = 1120
"""What one key with its value takes in Redis 7."""

_KEYS = 1_000_000_000
_CLIENTS = 8
_ASK_S = 60.0
_REST_S = 2.5
_GROW_S_MAX = 300.0


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or no Redis.
    """
    require_root("a host's memory cgroup")
    for program in ("redis-benchmark", "redis-check-rdb"):
        if find(program) is None:
            raise SkipError(f"{program} is not installed (redis-tools)")
    samples = Samples()
    for _ in bench.rounds(KEY):
        for side in (KEEPS, LENDS):
            bench.await_quiet()
            samples.add(side, **measure(bench, lends=side == LENDS))
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes(bench, samples))


def measure(bench: Bench, *, lends: bool) -> dict[str, float]:
    """One growth.

    Raises:
        SystemCallError: the host was out of memory, or nothing was evicted.
    """
    with hosts.host(bench, "host") as cgroup, redis(bench, cgroup) as path:
        if not lends:
            return {**grow(bench, path), "lent": 0, "evicted": 0}
        with hosts.lending(bench, cgroup) as lending:
            lending.ask(time.monotonic() + _ASK_S, _REST_S)
            lent, before = lending.slabs, lending.evictions
            measured = grow(bench, path)
            evicted = lending.evictions - before
        hosts.check_alive(cgroup)
    if not evicted:
        raise SystemCallError(f"none of {lent} slabs was evicted: the host was not in need")
    return {**measured, "lent": lent, "evicted": evicted}


@contextmanager
def redis(bench: Bench, cgroup: MemoryCgroup) -> Iterator[Path]:
    """A server of our own in the host's memory, on a socket that goes away with the run. Debian's
    redis-tools have the program, which does what its name says, and start no service."""
    program = bench.work / "redis-server"
    if not program.is_symlink():
        program.symlink_to(str(find("redis-check-rdb")))
    path = bench.work / "redis.sock"
    path.unlink(missing_ok=True)
    argv = [str(program), "--port", "0", "--unixsocket", str(path), "--save", ""]
    argv += ["--appendonly", "no", "--dir", str(bench.work), "--loglevel", "warning"]
    with bench.running("redis", argv) as child:
        cgroup.add(child.pid)

        def serves() -> bool:
            if not child.is_running:
                raise child.failed("ended")
            return answers(path)

        bench.until(serves, "Redis to serve", START_S)
        yield path


def answers(path: Path) -> bool:
    """Whether a Redis serves there."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(START_S)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        except (FileNotFoundError, ConnectionRefusedError):
            return False


def grow(bench: Bench, path: Path) -> dict[str, float]:
    """Fills it with values under random keys."""
    keys = round(bench.settings.host_bytes * GROWTH_SHARE / _KEY_BYTES)
    argv = ["redis-benchmark", "-s", str(path), "-t", "set", "-d", str(_VALUE_BYTES)]
    argv += ["-r", str(_KEYS), "-n", str(keys), "-c", str(_CLIENTS), "--csv", "--precision", "3"]
    return parse(bench.run("redis-benchmark", argv, _GROW_S_MAX))


def parse(text: str) -> dict[str, float]:
    """What redis-benchmark --csv prints.

    Raises:
        SystemCallError: something else.
    """
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    try:
        return {
            "requests_per_s": float(rows[0]["rps"]),
            "p50_ms": float(rows[0]["p50_latency_ms"]),
            "p99_ms": float(rows[0]["p99_latency_ms"]),
            "max_ms": float(rows[0]["max_latency_ms"]),
        }
    except (IndexError, KeyError, ValueError) as error:
        raise SystemCallError(f"redis-benchmark printed {text[:300]!r}") from error


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    ours, theirs = samples.values[LENDS], samples.values[KEEPS]

    def latency(name: str, key: str, bound: float | None) -> Figure:
        target = None if bound is None else at_most(bound)
        return Figure(name, "ms", ours[key], theirs[key], KEEPS, our_name=LENDS, target=target)

    return [
        Figure(
            "throughput", "SET/s", ours["requests_per_s"], theirs["requests_per_s"], KEEPS,
            better="higher", target=at_least(1.0 - paper.HOST_LOST), our_name=LENDS,
        ),
        latency("p50", "p50_ms", None),
        latency("p99", "p99_ms", 1.0 + paper.HOST_TAIL),
        latency("slowest", "max_ms", None),
    ]  # fmt: skip


def notes(bench: Bench, samples: Samples) -> list[str]:
    """What one must know."""
    host_bytes, slab_bytes = bench.settings.host_bytes, bench.settings.slab_bytes
    lent, evicted = samples.of(LENDS, "lent"), samples.of(LENDS, "evicted")
    return [
        f"A host of {format_size_short(host_bytes)} (a memory cgroup, no swap), an eighth of it "
        f"headroom; Redis with {_CLIENTS} clients takes "
        f"{format_size_short(round(host_bytes * GROWTH_SHARE))} in values of {_VALUE_BYTES} bytes. "
        "Target: the paper's Table 1.",
        f"Lent before: {min(lent):.0f} to {max(lent):.0f} slabs of "
        f"{format_size_short(slab_bytes)}, evicted meanwhile: {min(evicted):.0f} to "
        f"{max(evicted):.0f}. The consumer does nothing but give them up; it runs on the same "
        "processors.",
    ]
