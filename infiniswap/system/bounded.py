# SPDX-License-Identifier: Apache-2.0
"""Giving up rights for good, as systemd's CapabilityBoundingSet= and NoNewPrivileges= do it.

The kernel keeps all of this for each thread. Threads and programs that a thread starts inherit it,
others of the process do not, so a process gives its rights up before it has a second thread, or
starts a program from a thread that has (infiniswap.system.programs.start).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from infiniswap.errors import from_oserror
from infiniswap.rights import CAPABILITIES
from infiniswap.system.files import PROC, read_text

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_GET_NO_NEW_PRIVS: Final = 39
_CAPABILITY_VERSION_3: Final = 0x2008_0522
_BITS_MAX: Final = 64
_WHAT: Final = "the process cannot give up its rights"


_Result = TypeVar("_Result")


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Words(ctypes.Structure):
    """Half of each set. capset(2) takes two, the lower 32 bits first."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def give_up(keep: Sequence[str], *, proc: Path = PROC) -> None:
    """The calling thread has no other capabilities from now on, nor will programs that it executes,
    whoever owns them and whatever their mode.

    The bounding set stays where the process may not change it (without CAP_SETPCAP). That takes
    nothing away: no program can gain what the thread has not.

    A process that somebody has bounded before keeps what it was left where a filter of system calls
    lets it give nothing up. The unit of a device does that: it may leave more than this kernel
    needs, when another kernel ran at its installation.

    Args:
        keep: names of rights.CAPABILITIES; those that the thread has not stay away.
        proc: root of the proc file system.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    wanted = sum(1 << CAPABILITIES[name] for name in keep)
    libc = ctypes.CDLL(None, use_errno=True)
    is_bounded = libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _refused()
    _bound(libc, wanted)
    permitted, effective, inheritable = _sets(proc)
    if not ((permitted | effective) & ~wanted or inheritable):
        return
    if _set(libc, permitted & wanted, effective & wanted):
        return
    # The kernel itself lets everybody give capabilities up, so this is a filter.
    if not is_bounded or ctypes.get_errno() != errno.EPERM:
        raise _refused()


def within(keep: Sequence[str], work: Callable[[], _Result]) -> _Result:
    """Does something in a thread that has given its other rights up. This process keeps its own.

    Args:
        keep: see give_up.
        work: what to do.

    Raises:
        NotPermittedError, SystemCallError: see give_up.
        Others: of `work`.
    """

    def bounded() -> _Result:
        give_up(keep)
        return work()

    with ThreadPoolExecutor(1, "fewer rights") as thread:
        return thread.submit(bounded).result()


def _bound(libc: ctypes.CDLL, wanted: int) -> None:
    """Changes the bounding set, from which programs get theirs."""
    for bit in range(_BITS_MAX):
        if wanted >> bit & 1 or libc.prctl(_PR_CAPBSET_READ, bit, 0, 0, 0) != 1:
            continue  # it is to stay, is not there, or this kernel does not know it
        if libc.prctl(_PR_CAPBSET_DROP, bit, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EPERM:
            raise _refused()


def _sets(proc: Path) -> tuple[int, int, int]:
    """Permitted, effective and inheritable ones of the calling thread."""
    text = read_text(proc / "thread-self" / "status", "cannot read the process's capabilities")
    found = dict(line.partition(":\t")[::2] for line in text.splitlines())
    return int(found["CapPrm"], 16), int(found["CapEff"], 16), int(found["CapInh"], 16)


def _set(libc: ctypes.CDLL, permitted: int, effective: int) -> bool:
    header = _Header(_CAPABILITY_VERSION_3, 0)
    words = (_Words * 2)(
        *(_Words(effective >> at & 0xFFFF_FFFF, permitted >> at & 0xFFFF_FFFF, 0) for at in (0, 32))
    )
    return bool(libc.capset(ctypes.byref(header), words) == 0)


def _refused() -> Exception:
    code = ctypes.get_errno()
    return from_oserror(_WHAT, OSError(code, os.strerror(code)))
