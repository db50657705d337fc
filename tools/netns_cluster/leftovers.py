# SPDX-License-Identifier: Apache-2.0
"""Taking a cluster away, whatever has been left of it: `down` does that, and the next `up`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    SystemCallError,
    UnavailableError,
    from_oserror,
)
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.process import pidfd_ended, pidfd_open, pidfd_signal
from netns_cluster import memory, network, processes
from netns_cluster.record import state_directory, work_directory

_DEVICE_S_MAX = 180.0
_TERM_S = 15.0
_KILL_S = 10.0


def exists(name: str) -> bool:
    """Whether anything of that cluster is there."""
    with contextlib.suppress(UnavailableError):
        if memory.cluster_cgroup(name).path.is_dir():
            return True
    return bool(
        network.all_namespaces(name)
        or state_directory(name).exists()
        or work_directory(name).exists()
    )


def sweep(name: str) -> None:
    """Takes away everything of the cluster that is there, in an order in which nothing is pulled
    from under another. Idempotent.

    Raises:
        ConflictError: the caller is in one of its hosts.
        InfiniswapError: something is in use, says what. The rest stays, and so it can be tried
            again.
    """
    namespaces = network.all_namespaces(name)
    if processes.parent_pids() & {pid for one in namespaces for pid in network.pids(one)}:
        raise ConflictError(
            "a cluster cannot be taken down from one of its hosts", mend="Leave that shell first."
        )
    _thaw(name)
    _end_jobs(name)
    _remove_devices(name)
    left = [pid for one in namespaces for pid in network.pids(one)]
    serving = [pid for pid in left if processes.is_device_process(pid)]
    if serving:  # of a device whose run directory is elsewhere
        _end(serving, kill=False)
    _end(left, kill=True)
    memory.remove(name)
    network.remove(name)
    for directory in (work_directory(name), state_directory(name)):
        _remove_directory(directory)


def _thaw(name: str) -> None:
    """Daemons must answer while pages are swapped in."""
    with contextlib.suppress(UnavailableError):
        for pid in memory.cluster_cgroup(name).pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)


def _end_jobs(name: str) -> None:
    """What runs on the hosts, but for daemons and devices."""
    keep: set[int] = set()
    with contextlib.suppress(UnavailableError):
        top = memory.cluster_cgroup(name)
        for path in top.path.glob(f"*/{memory.SYSTEM}"):
            keep.update(MemoryCgroup(path, top.version).pids())
        _end([pid for jobs in top.path.glob(f"*/{memory.JOBS}") for pid in _pids(jobs, top)], True)
    found = [
        pid
        for one in network.all_namespaces(name)
        if not one.endswith("-net")
        for pid in network.pids(one)
        if pid not in keep and not processes.is_device_process(pid)
    ]
    _end(found, kill=True)


def _pids(path: Path, like: MemoryCgroup) -> tuple[int, ...]:
    return MemoryCgroup(path, like.version).pids()


def _end(pids: list[int], kill: bool) -> None:
    """SIGTERM to all at once, then SIGKILL to those that stay.

    Raises:
        DeadlineError: one stays.
    """
    opened: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(NotFoundError):
                opened[pid] = pidfd_open(pid)
        steps = [(signal.SIGTERM, _TERM_S if kill else _DEVICE_S_MAX)]
        for number, wait_s in [*steps, (signal.SIGKILL, _KILL_S)] if kill else steps:
            for pidfd in opened.values():
                pidfd_signal(pidfd, number)
                pidfd_signal(pidfd, signal.SIGCONT)
            end_s = time.monotonic() + wait_s
            opened_now = {
                pid: pidfd
                for pid, pidfd in opened.items()
                if not pidfd_ended(pidfd, max(0.0, end_s - time.monotonic()))
            }
            if not opened_now:
                return
        text = ", ".join(str(pid) for pid in opened_now)
        raise DeadlineError(f"these processes do not end: {text}", mend="See dmesg and their logs.")
    finally:
        for pidfd in opened.values():
            os.close(pidfd)


def _remove_devices(name: str) -> None:
    """Through the product's own command: swapoff, detach, delete.

    Raises:
        SystemCallError: one cannot be removed, says why.
    """
    for run in sorted(state_directory(name).glob("*/devices/*")):
        host = run.parent.parent.name
        config = run.parent.parent / "infiniswap.toml"
        argv = [sys.executable, "-m", "infiniswap", "device", "remove", run.name]
        if network.namespace(name, host) in network.all_namespaces(name):
            argv = network.inside(name, host, argv)
        try:
            done = subprocess.run(
                argv,
                env=processes.environment(config),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_DEVICE_S_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"the device {run.name} of {host} was not gone within {_DEVICE_S_MAX:g} s",
                where=str(run),
            ) from error
        if done.returncode != 0 and run.exists():
            raise SystemCallError(
                f"the device {run.name} of {host} cannot be removed: {done.stderr.strip()}",
                where=str(run),
                mend="End what uses it, then take the cluster down again.",
            )


def _remove_directory(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise from_oserror("cannot remove", error, where=str(path)) from error
