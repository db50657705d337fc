# SPDX-License-Identifier: Apache-2.0
"""What `run --paging far` needs, looked at before anything starts, and what its job inherits.

The job's programs load the agent (csrc/far/) by LD_PRELOAD. It finds there, as open descriptors, a
socket to the device and /dev/userfaultfd, and the numbers of both in INFINISWAP_FAR. Processes of
ours never get any of that.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.device.control import far_client
from infiniswap.device.jobs.job import Preload
from infiniswap.device.jobs.sudo import User, acting_as
from infiniswap.device.spec import rundir
from infiniswap.errors import UnavailableError, UsageError, from_oserror
from infiniswap.own_code import FAR_VARIABLE
from infiniswap.system import userfault
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.executable import why_not_preloaded
from infiniswap.system.files import PROC, try_read_int
from infiniswap.units import MIB, format_size, format_size_short

LOCAL_BYTES_MIN: Final = 64 * MIB
"""Below this the blocks under way would be a large part of the job's memory."""

_DESCRIPTOR: Final = 600
"""Numbers of the job's descriptors begin here: shells and scripts use low ones."""

_DESCRIPTORS: Final = 8
_SWAP: Final = "or run it with --paging swap."


@dataclass(frozen=True, slots=True)
class FarPaging:
    """That a job has far memory.

    Attributes:
        library: the agent.
        unfit: why the command's program runs without it, as a whole sentence; empty: it does not.
    """

    library: Path
    unfit: str = ""


def wanted(
    args: argparse.Namespace,
    command: Sequence[str],
    user: User | None,
    local_bytes: int,
    *,
    library: Path | None = None,
    obstacle: Callable[[], userfault.Obstacle | None] = userfault.far_obstacle,
    proc: Path = PROC,
) -> FarPaging | None:
    """What --paging asks for; None: swap alone.

    Args:
        args: of `run`.
        command: the job's.
        user: whom it runs as; None: as this process.
        local_bytes: its limit.
        library: the agent; None: that of this installation.
        obstacle: says why this host cannot do far memory.
        proc: root of the proc file system.

    Raises:
        UsageError: it cannot be with these arguments.
        UnavailableError: it cannot be on this host, or in this shell.
        NotPermittedError: the job's user cannot read the agent.
    """
    if args.paging != "far":
        return None
    if args.device is not None:
        raise UsageError(
            "--paging far cannot be used together with --device: far memory needs the device that "
            "`run` makes",
            mend=f"Leave --device out, {_SWAP}",
        )
    if local_bytes < LOCAL_BYTES_MIN:
        raise UsageError(
            f"--paging far needs at least {format_size(LOCAL_BYTES_MIN)} of local memory, not "
            f"{format_size_short(local_bytes)}",
            mend=f"Give a larger --local, {_SWAP}",
        )
    _check_limits(proc)
    if (found := obstacle()) is not None:
        raise UnavailableError(
            f"--paging far is not possible here: {found.what}",
            mend=f"{found.mend.rstrip('.')}, {_SWAP}",
        )
    library = library or agent_library()
    _check_library(library, user)
    return FarPaging(library, _unfit(command, user))


def _check_limits(proc: Path) -> None:
    for name, option in (("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")):
        if resource.getrlimit(getattr(resource, name))[0] != resource.RLIM_INFINITY:
            raise UnavailableError(
                f"--paging far reserves much address space, and {name} limits that",
                mend=f"Take the limit back in this shell (ulimit {option} unlimited), {_SWAP}",
            )
    if try_read_int(proc / "sys/vm/overcommit_memory") == 2:
        raise UnavailableError(
            "--paging far reserves much address space, and this host allows no overcommit "
            "(vm.overcommit_memory is 2)",
            mend=f"Allow it (sysctl vm.overcommit_memory=0), {_SWAP}",
        )


def agent_library() -> Path:
    """The agent, which lies beside the C extension.

    Raises:
        UnavailableError: it is not installed.
    """
    from infiniswap.engine.binding import extension_path

    library = extension_path().parent.parent / "device" / "libinfiniswap-far.so"
    if not library.is_file():
        raise UnavailableError(
            "the agent of far memory is not installed",
            where=str(library),
            mend=f"Install the package again, {_SWAP}",
        )
    return library


def _check_library(library: Path, user: User | None) -> None:
    """Raises InfiniswapError unless every program of the job can load it."""
    with acting_as(user):
        try:
            os.close(os.open(library, os.O_RDONLY | os.O_CLOEXEC))
            flags = os.statvfs(library).f_flag
        except OSError as error:
            raise from_oserror(
                "the command's user cannot read the agent of far memory",
                error,
                where=str(library),
                mend=f"Let everybody read it and enter the directories above it, {_SWAP}",
            ) from error
    problem = ""
    if flags & os.ST_NOEXEC:
        problem = "lies on a file system that is mounted with noexec"
    elif any(mark in str(library) for mark in ": \t\n$"):
        problem = "has a blank, `:` or `$` in its path, which LD_PRELOAD cannot have"
    if problem:
        raise UnavailableError(
            f"the agent of far memory {problem}",
            where=str(library),
            mend=f"Install Infiniswap elsewhere, {_SWAP}",
        )


def _unfit(command: Sequence[str], user: User | None) -> str:
    environment = os.environ if user is None else user.environment
    uid = os.geteuid() if user is None else user.uid
    with acting_as(user):
        why = why_not_preloaded(command, environment.get("PATH", os.defpath), uid)
    return why and f"{command[0]} cannot load the agent: {why}"


@contextlib.contextmanager
def inherited(
    far: FarPaging | None, paths: rundir.DevicePaths, cgroup: MemoryCgroup, user: User | None
) -> Iterator[Preload | None]:
    """What the job gets at its start; this process's own copies are closed after that.

    Args:
        far: None: swap alone.
        paths: of the device.
        cgroup: of the job.
        user: of the job; None: whoever runs this.

    Raises:
        ConflictError: the device serves no far memory.
        InfiniswapError: something cannot be opened.
    """
    if far is None or far.unfit:
        yield None
        return
    if user is not None:
        cgroup.allow_reclaim(user.uid)
    with contextlib.ExitStack() as stack:
        with far_client.connect(paths) as own:
            socket_fd = _moved_up(own.fileno(), stack)
        fault_fd = _open_userfaultfd(stack)
        yield Preload(
            library=str(far.library),
            variables={FAR_VARIABLE: f"{socket_fd}:{fault_fd}:{cgroup.path}"},
            descriptors=(socket_fd, fault_fd),
        )


def _open_userfaultfd(stack: contextlib.ExitStack) -> int:
    try:
        fd = os.open(userfault.DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise from_oserror("cannot open", error, where=str(userfault.DEVICE)) from error
    try:
        return _moved_up(fd, stack)
    finally:
        os.close(fd)


def _moved_up(fd: int, stack: contextlib.ExitStack) -> int:
    """A copy with a high number, or as high as this shell allows."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = _DESCRIPTOR if most < 0 else max(3, min(_DESCRIPTOR, most - _DESCRIPTORS))
    try:
        copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError as error:
        raise from_oserror("cannot copy a descriptor for the job", error) from error
    stack.callback(os.close, copy)
    return copy
