# SPDX-License-Identifier: Apache-2.0
"""Memory use of hosts over time, from a CSV file.

    time_s,host,used_share
    0,a,0.41
    0,b,0.72
    60,a,0.43
    ...

Rows are sorted by time; every host has a row at each time. `used_share` is a number from 0 to 1.
A mistake names the file, the line and the remedy.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import ConfigError, from_oserror

COLUMNS: Final = ("time_s", "host", "used_share")


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read.

    Attributes:
        times_s: rising; the first is zero.
        hosts: names, sorted.
        used: by time, then by host.
    """

    times_s: tuple[float, ...]
    hosts: tuple[str, ...]
    used: tuple[tuple[float, ...], ...]

    def at(self, time_s: float) -> tuple[float, ...]:
        """Used shares of the last time that is not after this one."""
        return self.used[max(0, bisect_right(self.times_s, time_s) - 1)]


def read_trace(path: Path, *, hold_gaps: bool) -> Trace:
    """Reads a trace.

    Args:
        path: the file.
        hold_gaps: a host without a row keeps its last value.

    Raises:
        ConfigError: a mistake in it.
        InfiniswapError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _collect(path, csv.reader(file), hold_gaps)
    except UnicodeDecodeError as error:
        raise _wrong(path, 1, f"not text: {error.reason}", "Save it as UTF-8.") from None
    except csv.Error as error:
        raise _wrong(path, 1, f"not CSV: {error}", "Write three columns, with commas.") from None
    except OSError as error:
        raise from_oserror("cannot read the trace", error, where=str(path)) from error


def _collect(path: Path, rows: Iterator[list[str]], hold_gaps: bool) -> Trace:
    by_time: dict[float, dict[str, float]] = {}
    lines: dict[float, int] = {}
    before_s = -math.inf
    for line, row in enumerate(rows, 1):
        if line == 1:
            if tuple(column.strip() for column in row) != COLUMNS:
                mend = f"Begin the file with {','.join(COLUMNS)}."
                raise _wrong(path, line, "the first line does not name the columns", mend)
            continue
        if not row:
            continue
        time_s, host, used = _row(path, line, row)
        if time_s < before_s:
            what = f"time runs backwards, from {before_s:g} to {time_s:g} s"
            raise _wrong(path, line, what, "Sort the rows by time_s.")
        before_s = time_s
        lines.setdefault(time_s, line)
        if host in by_time.setdefault(time_s, {}):
            what = f"host {host!r} has two rows at {time_s:g} s"
            raise _wrong(path, line, what, "Remove one of them.")
        by_time[time_s][host] = used
    if not by_time:
        raise _wrong(path, 1, "there is no row", "Add rows, or remove load.trace.")
    return _complete(path, by_time, lines, hold_gaps)


def _row(path: Path, line: int, row: list[str]) -> tuple[float, str, float]:
    if len(row) != len(COLUMNS):
        mend = f"Write {','.join(COLUMNS)}."
        raise _wrong(path, line, f"{len(row)} columns in place of {len(COLUMNS)}", mend)
    time_s, used = _number(path, line, row[0], "time_s"), _number(path, line, row[2], "used_share")
    if time_s < 0.0:
        raise _wrong(path, line, f"time_s is {row[0].strip()}", "Begin at 0 s.")
    if not 0.0 <= used <= 1.0:
        mend = "Write a share from 0 to 1, for example 0.41 for 41 %."
        raise _wrong(path, line, f"used_share is {row[2].strip()}", mend)
    if not row[1].strip():
        raise _wrong(path, line, "the host has no name", "Name it in the second column.")
    return time_s, row[1].strip(), used


def _number(path: Path, line: int, text: str, column: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        mend = 'Write a number, or remove the row and set load.trace_gaps = "hold".'
        raise _wrong(path, line, f"{column} is {text.strip() or 'empty'!a}, not a number", mend)
    return number


def _complete(
    path: Path,
    by_time: dict[float, dict[str, float]],
    lines: dict[float, int],
    hold_gaps: bool,
) -> Trace:
    hosts = tuple(sorted({host for row in by_time.values() for host in row}))
    first_s = next(iter(by_time))
    used: list[tuple[float, ...]] = []
    for time_s, row in by_time.items():
        absent = [host for host in hosts if host not in row]
        if absent and not (hold_gaps and used):
            what = f"{len(absent)} of {len(hosts)} hosts have no row at {time_s:g} s: {absent[0]!r}"
            mend = 'Add it, or set load.trace_gaps = "hold".'
            if hold_gaps:
                mend = "Every host needs a row at the first time: there is nothing to hold."
            raise _wrong(path, lines[time_s], what, mend)
        before = dict(zip(hosts, used[-1], strict=True)) if used else {}
        used.append(tuple(row.get(host, before.get(host, 0.0)) for host in hosts))
    return Trace(tuple(time_s - first_s for time_s in by_time), hosts, tuple(used))


def _wrong(path: Path, line: int, what: str, mend: str) -> ConfigError:
    return ConfigError(what, where=f"{path}, line {line}", mend=mend)
