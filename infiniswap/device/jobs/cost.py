# SPDX-License-Identifier: Apache-2.0
"""What a device takes of the host that it serves: memory of its processes, beside the job's limit.

All of it is locked, and there from the start: a device as large as what it pages out costs more
than it saves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.device.api import DeviceStatus
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.system.files import PROC, try_read_text
from infiniswap.system.touched import rollup
from infiniswap.units import MIB, PAGE_BYTES

_PROCESS_BYTES: Final = 96 * MIB
"""Python, its libraries and the threads of a locked process: the device's, and its standby's."""

_RUN_BYTES: Final = 40 * MIB
"""`infiniswap run` itself, the holder, and the process beside the job."""

RING_BYTES: Final = 12 * MIB
"""Locked memory that the device shares with each process that has far memory (ISWF_RING_BYTES,
but for its header)."""

_FAR_BYTES: Final = 9 * MIB
"""Memory of far memory's front end: four blocks that reads arrive in, and a table of the numbers
that processes may give their blocks (csrc/frontend/far.h)."""

_BYTES_PER_PAGE: Final = 24
"""Tables of the engine: where a page is, and its seal."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a device took beside the job's limit.

    Attributes:
        memory_bytes: of this host, for its processes and for `infiniswap run`.
        disk_bytes: for the backup; 0: there is none.
        donors_bytes: the most that donors hold for it.
    """

    memory_bytes: int
    disk_bytes: int
    donors_bytes: int


def expected(spec: DeviceSpec) -> Cost:
    """Returns the most that a run with this device takes; see expected_bytes."""
    return Cost(
        expected_bytes(spec),
        spec.engine_bytes if spec.backup is not None else 0,
        spec.slab_count * spec.config.device.slab_bytes,
    )


def expected_bytes(spec: DeviceSpec) -> int:
    """Memory that a run with this device takes, beside the limit of its job, with one process that
    has far memory. The figures above were measured (README has more); another version of Python
    changes them by some MiB."""
    device = spec.config.device
    processes = 2 if device.standby == "on" else 1
    tables = spec.engine_bytes // PAGE_BYTES * _BYTES_PER_PAGE
    far = _FAR_BYTES + RING_BYTES if spec.far_bytes else 0
    return _RUN_BYTES + processes * _PROCESS_BYTES + device.staging_bytes + tables + far


def measured(
    status: DeviceStatus, donors_bytes: int, *, far_processes: int = 0, proc: Path = PROC
) -> Cost | None:
    """Measures what the device takes now: the proportional set sizes (PSS) of this process, the
    device's, its standby's and the holder's. None if one of them cannot be read.

    Args:
        status: of the device.
        donors_bytes: the most that donors held for it.
        far_processes: the most that had far memory at once; their rings are gone by now.
        proc: root of the proc file system.
    """
    pids = {os.getpid(), status.pid}
    if status.succession is not None and status.succession.holder_pid is not None:
        holder = status.succession.holder_pid
        pids |= {holder, *_children(holder, proc)}
    sizes = [rollup(pid, proc=proc).get("Pss") for pid in pids]
    found = [size for size in sizes if size is not None]
    if len(found) < len(sizes):
        return None
    far_bytes = 0 if status.far is None else status.far.bytes
    disk_bytes = 0 if status.backup is None else status.size_bytes + far_bytes
    return Cost(sum(found) + far_processes * RING_BYTES, disk_bytes, donors_bytes)


def _children(pid: int, proc: Path) -> Iterable[int]:
    for task in (proc / str(pid) / "task").glob("*/children"):
        yield from (int(word) for word in (try_read_text(task) or "").split() if word.isdecimal())
