# SPDX-License-Identifier: Apache-2.0
"""The peer: perftest's programs, server and client on the same port of the same device."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from infiniswap.errors import SystemCallError
from infiniswap.system.files import PROC, try_read_text
from infiniswap.units import MIB
from isw_bench.bench import Bench, require_programs
from isw_bench.rdma.place import Place
from isw_bench.rdma.sides import RUN_S

PEERS = {"ib_read_lat": "perftest"}
"""Package by program, see machine.install_peers."""

COUNT_MIN = 100
_LISTENS = "0A"
_QP_TIMEOUT = "18"
"""1 s: on a slow machine the usual 67 ms may send again what is only late."""

_NUMBER = r"(-?[0-9.]+|-?inf|-?nan)"
_NUMBERS = re.compile(rf"\s*{_NUMBER}(\s+{_NUMBER})+\s*")
_TRIES = 5
"""It first takes the rate of this processor's clock; where others disturb that, it takes 0."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one transfer after the other; p50 is the column t_typical."""

    p50_us: float
    mean_us: float
    p99_us: float


def latency(
    bench: Bench, at: Place, program: str, size_bytes: int, count: int, *, events: bool = False
) -> Latency:
    """Runs `ib_read_lat` or `ib_write_lat`; events: sleep until the completion (-e).

    Raises:
        SkipError: it is not installed.
    """
    # #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%
    row = _row(bench, at, program, size_bytes, count, ["-e"] if events else [])
    return Latency(p50_us=row[4], mean_us=row[5], p99_us=row[7])


def mb_per_s(
    bench: Bench,
    at: Place,
    program: str,
    size_bytes: int,
    count: int,
    *,
    depth: int,
    events: bool = False,
) -> float:
    """Runs `ib_write_bw` or `ib_read_bw` with that many transfers under way, in one direction.

    Raises:
        SkipError: it is not installed.
    """
    options = ["-t", str(depth), *(["-e"] if events else [])]
    # #bytes #iterations peak average, both in MiB/s, MsgRate
    row = _row(bench, at, program, size_bytes, count, options)
    return row[3] * MIB / 1e6


def _row(
    bench: Bench, at: Place, program: str, size_bytes: int, count: int, options: Sequence[str]
) -> list[float]:
    """Raises SystemCallError: it could not measure."""
    for _ in range(_TRIES):
        row = table(_run(bench, at, program, size_bytes, count, options))
        if is_measured(row):
            return row
        bench.say(f"{program} could not measure: once more")
    raise SystemCallError(f"{program} could not measure in {_TRIES} runs: {row}")


def is_measured(row: Sequence[float]) -> bool:
    """Whether it knew the processor's clock."""
    return all(0 < value < math.inf for value in row[2:4])


def table(text: str) -> list[float]:
    """The numbers of the line below the headings.

    Raises:
        SystemCallError: there is none.
    """
    lines = iter(text.splitlines())
    for line in lines:
        if line.lstrip().startswith("#bytes"):
            break
    for line in lines:
        if _NUMBERS.fullmatch(line):
            return [float(word) for word in line.split()]
    raise SystemCallError(f"perftest printed no table: {text[-300:]!r}")


def _run(
    bench: Bench, at: Place, program: str, size_bytes: int, count: int, options: Sequence[str]
) -> str:
    require_programs(program)
    port = _free_port()
    argv = [program, "-d", at.device, "-i", str(at.port), "-p", str(port), "-F"]
    argv += [] if at.gid_index is None else ["-x", str(at.gid_index)]
    argv += ["-s", str(size_bytes), "-n", str(max(count, COUNT_MIN)), "-u", _QP_TIMEOUT, *options]
    label = f"{program} {' '.join(options)}".strip()
    with bench.running(f"{label}, server", argv) as server:

        def listens() -> bool:
            if not server.is_running:
                raise server.failed("ended")
            return is_listening(port)

        bench.until(listens, f"{program} to listen")
        return bench.run(label, [*argv, at.address], RUN_S)


def _free_port() -> int:
    """It has to be told one, and cannot be given a socket."""
    with socket.create_server(("", 0)) as listener:
        number: int = listener.getsockname()[1]
    return number


def is_listening(port: int) -> bool:
    """Whether somebody here listens on that TCP port. (To connect would be the one connection that
    perftest takes.)"""
    for name in ("tcp", "tcp6"):
        for line in (try_read_text(PROC / "net" / name) or "").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False
