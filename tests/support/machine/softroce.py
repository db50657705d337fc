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

from infiniswap.errors import EngineError
from support.devices.cluster import run, until

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


@contextmanager
def two_links() -> Iterator[dict[str, str]]:
    """Two RDMA devices joined by a cable, and by the address that is reached over it.

    Both ends are this machine's. So that its packets to itself go over the cable, addresses count
    as its own only for what comes in; what it sends follows a route for each of them.
    """
    run("modprobe", "-a", "rdma_rxe", "ib_uverbs", "veth", "nbd")
    ends = [("isw-a", "10.89.4.1"), ("isw-b", "10.89.4.2")]
    with contextlib.ExitStack() as undo:
        run("ip", "link", "add", "isw-a", "mtu", "4200", "type", "veth", "peer", "isw-b")
        undo.callback(run, "ip", "link", "delete", "isw-a")
        for interface, address in ends:
            run("ip", "address", "add", f"{address}/24", "dev", interface)
            run("ip", "link", "set", interface, "mtu", "4200", "up")
            settings = Path("/proc/sys/net/ipv4/conf", interface)
            (settings / "accept_local").write_text("1")
            (settings / "rp_filter").write_text("0")
        everybody = Path("/proc/sys/net/ipv4/conf/all/rp_filter")
        undo.callback(everybody.write_text, everybody.read_text())
        everybody.write_text("0")
        for table, (near, (_, far)) in enumerate(zip(ends, reversed(ends), strict=True), 7001):
            hop = [far, "dev", near[0], "src", near[1], "table", str(table)]
            run("ip", "route", "add", *hop)
            rule = ["iif", "lo", "to", far, "lookup", str(table), "preference", "90"]
            run("ip", "rule", "add", *rule)
            undo.callback(run, "ip", "rule", "delete", *rule)
        _local_looked_up(before="0", at="100")
        undo.callback(_local_looked_up, before="100", at="0")
        found = {}
        for interface, address in ends:
            device = interface.replace("isw-", "rxe")
            run("rdma", "link", "add", device, "type", "rxe", "netdev", interface)
            undo.callback(run, "rdma", "link", "delete", device)
            found[device] = address
        until(lambda: not any(map(leads_to, found.values())), "ports that lead there")
        yield found


def _local_looked_up(*, before: str, at: str) -> None:
    """Moves the rule by which an address is this host's own."""
    run("ip", "rule", "add", "preference", at, "lookup", "local")
    run("ip", "rule", "delete", "preference", before, "lookup", "local")


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
    return leads_to(HOST)


def leads_to(address: str) -> str:
    """Why no RDMA leads there; empty when it does."""
    from infiniswap.engine.native_rdma import rdma_choose

    try:
        rdma_choose(address)
    except EngineError as error:
        return error.what
    return ""
