# SPDX-License-Identifier: Apache-2.0
"""The attendants that run beside jobs, as found from outside."""

from __future__ import annotations

import re
from pathlib import Path

from support.devices.cluster import until

LOOKS = 6
"""Rests of an attendant, one after each look: more than its start takes."""


def attendants(of: Path) -> list[str]:
    """Process ids of those of a job's cgroup."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(of).encode() in words:
                found.append(entry.name)
    return found


def await_attendant(of: Path) -> int:
    """Waits until an attendant of the job's cgroup runs; its process id."""
    return int(until(lambda: next(iter(attendants(of)), None), "the attendant to run"))


def await_looks(of: Path) -> None:
    """Waits until the job's attendant has looked at it several times."""
    pid = await_attendant(of)
    first = _rests(pid)
    until(lambda: _rests(pid) >= first + LOOKS, "the attendant to look at the job")


def _rests(pid: int) -> int:
    status = Path("/proc", str(pid), "status").read_text()
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", status, re.MULTILINE)
    assert found is not None
    return int(found[1])
