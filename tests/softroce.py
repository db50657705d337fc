# SPDX-License-Identifier: Apache-2.0
"""Soft-RoCE for tests in a guest, on an interface of its own that has the loopback address, too.

So it can be switched off while TCP goes on, and no other fixture needs to know of it.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import run, until

from infiniswap.errors import EngineError

HOST = "127.0.0.1"
LINK = "isw-rdma"
DEVICE = "rxe0"


@contextmanager
def soft_roce() -> Iterator[str]:
    """The device's name, once its port leads to HOST."""
    run("modprobe", "-a", "rdma_rxe", "ib_uverbs", "dummy", "nbd")
    run("ip", "link", "add", LINK, "type", "dummy")
    try:
        run("ip", "address", "add", f"{HOST}/8", "dev", LINK)
        run("ip", "link", "set", LINK, "mtu", "4200", "up")
        add()
    except BaseException:
        run("ip", "link", "delete", LINK)
        raise
    try:
        yield DEVICE
    finally:
        # If it cannot be, neither can the interface: that would be waited for, too.
        if DEVICE in run("rdma", "link", "show"):
            remove()
        run("ip", "link", "delete", LINK)


def add() -> None:
    """The device; its port leads to HOST."""
    run("rdma", "link", "add", DEVICE, "type", "rxe", "netdev", LINK)
    until(lambda: leads_here() == "", "a port that leads here")


def remove() -> None:
    """The device, perhaps while it is used: the kernel waits until everybody has closed it.

    Raises:
        AssertionError: who has not, in time. No signal ends a process that waits for that.
    """
    removing = subprocess.Popen(["rdma", "link", "delete", DEVICE], stdin=subprocess.DEVNULL)
    try:
        until(lambda: removing.poll() is not None, f"the end of {DEVICE}")
    except AssertionError as error:
        raise AssertionError(f"{DEVICE} is open in {sorted(users())}") from error
    assert removing.returncode == 0


def users() -> set[str]:
    """Commands of the processes that have an RDMA device open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if "/uverbs" in str(link.readlink()):
                process = link.parent.parent
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.add(f"{process.name}: {command.strip()}")
    return found


def leads_here() -> str:
    """Why no RDMA leads to HOST; empty when it does."""
    from infiniswap.engine.native_rdma import rdma_choose

    try:
        rdma_choose(HOST)
    except EngineError as error:
        return error.what
    return ""
