# SPDX-License-Identifier: Apache-2.0
"""Our side: the whole engine (tools/bench/c/engine_load.c) on a donor's store, over RDMA or TCP."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infiniswap.units import PAGE_BYTES
from isw_bench.bench import START_S, Bench
from isw_bench.children import Child
from isw_bench.rdma.place import Place

OURS = "infiniswap"
RUN_S = 600.0
"""Of a program that measures: in a virtual machine without KVM all is slow."""

_SLOTS = 4
_WAIT_MS = "60000"


@dataclass(frozen=True, slots=True)
class Donor:
    """A donor's store."""

    child: Child
    port: int
    ticket: str
    slab_bytes: int


@contextlib.contextmanager
def donor(bench: Bench, at: Place) -> Iterator[Donor]:
    """A donor's store on that address, every slot mapped."""
    slab_bytes = bench.settings.donor_bytes // _SLOTS
    argv = [sys.executable, "-m", "isw_bench.rdma.donor", "--host", at.address]
    argv += ["--slots", str(_SLOTS), "--slab-bytes", str(slab_bytes)]
    changes = {"PYTHONPATH": str(bench.root / "tools" / "bench")}
    with bench.running("donor", argv, changes=changes, ends_on_eof=True) as child:
        told = child.answer(START_S)
        yield Donor(child, told["port"], told["ticket"], slab_bytes)


def load(
    bench: Bench,
    at: Place,
    to: Donor,
    op: str,
    *,
    transport: str = "rdma",
    request_bytes: int = PAGE_BYTES,
    depth: int = 1,
) -> dict[str, Any]:
    """Requests at random for the set time, on one connection; what engine_load printed.

    Raises:
        AssertionError: pages came from elsewhere.
    """
    argv = [bench.program("engine-load"), "--host", at.address, "--port", str(to.port)]
    argv += ["--ticket", to.ticket, "--slots", str(_SLOTS), "--slab-bytes", str(to.slab_bytes)]
    argv += ["--op", op, "--depth", str(depth), "--request-bytes", str(request_bytes)]
    argv += ["--queues", "1", "--rdma", str(int(transport == "rdma")), "--wait-ms", _WAIT_MS]
    argv += ["--ms", str(round(bench.settings.seconds * 1000)), "--watch", str(to.child.pid)]
    label = f"{op} by {transport}, {request_bytes} bytes, depth {depth}"
    with bench.running(label, argv) as child:
        if transport == "rdma":
            to.child.tell(child.line(START_S))
            child.tell(to.child.line(START_S))
        told: dict[str, Any] = child.answer(RUN_S)
    if told["pages_not_from_donor"]:
        raise AssertionError(f"{told['pages_not_from_donor']} pages did not come from the donor")
    return told
