# SPDX-License-Identifier: Apache-2.0
"""Pressure stall information: the kernel says when tasks had to wait for memory.

https://docs.kernel.org/accounting/psi.html: a threshold written to /proc/pressure/memory makes that
descriptor signal POLLPRI when tasks were stalled for so long within the window. Without
CAP_SYS_RESOURCE the window has to be a multiple of two seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from pathlib import Path

from infiniswap.errors import UnavailableError
from infiniswap.system.files import PROC, try_read_text

_STALL_US = 20_000
_WINDOW_US = 2_000_000


class PressureTrigger:
    """Becomes readable when somebody on this host has waited for memory.

    Args:
        stall_us: so long in sum.
        window_us: within this time.
        proc: root of the proc file system.

    Raises:
        UnavailableError: this kernel has no PSI, or does not grant a trigger.
    """

    def __init__(
        self, stall_us: int = _STALL_US, window_us: int = _WINDOW_US, *, proc: Path = PROC
    ) -> None:
        path = proc / "pressure" / "memory"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(
                f"no pressure figures: {error.strerror}", where=str(path)
            ) from error
        try:
            os.write(self._file, f"some {stall_us} {window_us}\0".encode())
            # Event loops watch for readable descriptors only; an epoll one is, with an event in it.
            self._poll = select.epoll(flags=select.EPOLL_CLOEXEC)
            self._poll.register(self._file, select.EPOLLPRI)
        except OSError as error:
            os.close(self._file)
            raise UnavailableError(
                f"no pressure trigger: {error.strerror}", where=str(path)
            ) from error

    def fileno(self) -> int:
        """Readable when it has fired; watched by an event loop.

        It is readable once: whoever sees that has taken it, as the kernel forgets it then.
        """
        return self._poll.fileno()

    def close(self) -> None:
        """Gives the trigger back. Idempotent."""
        with contextlib.suppress(ValueError):
            self._poll.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def pressure_percent(resource: str, *, proc: Path = PROC) -> float:
    """In which share of the last ten seconds some task waited for a resource, in percent.

    Args:
        resource: cpu, io or memory.
        proc: root of the proc file system.

    Raises:
        UnavailableError: this kernel does not tell.
    """
    path = proc / "pressure" / resource
    found = re.search(r"^some avg10=([0-9.]+) ", try_read_text(path) or "", re.MULTILINE)
    if found is None:
        raise UnavailableError(
            "no pressure figures",
            where=str(path),
            mend="Start the kernel with psi=1, or name a command or a query under [daemon.slo].",
        )
    return float(found[1])


def memory_stalls(*, proc: Path = PROC) -> dict[str, float]:
    """For how many seconds since the boot some, or all, tasks of this host waited for memory: by
    "some" and "full"; empty where the kernel does not tell."""
    stalls: dict[str, float] = {}
    for line in (try_read_text(proc / "pressure" / "memory") or "").splitlines():
        kind, *fields = line.split()
        total = dict(field.partition("=")[::2] for field in fields).get("total", "")
        if total.isdecimal():
            stalls[kind] = int(total) / 1e6
    return stalls
