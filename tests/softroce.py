# SPDX-License-Identifier: Apache-2.0
"""Soft-RoCE for tests in a guest, on an interface of its own that has the loopback address, too.

So it can be switched off while TCP goes on, and no other fixture needs to know of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        run("rdma", "link", "add", DEVICE, "type", "rxe", "netdev", LINK)
        until(lambda: leads_here() == "", "a port that leads here")
        yield DEVICE
        run("rdma", "link", "delete", DEVICE)
    finally:
        run("ip", "link", "delete", LINK)


def leads_here() -> str:
    """Why no RDMA leads to HOST; empty when it does."""
    from infiniswap.engine.native_rdma import rdma_choose

    try:
        rdma_choose(HOST)
    except EngineError as error:
        return error.what
    return ""
