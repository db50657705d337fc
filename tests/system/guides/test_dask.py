# SPDX-License-Identifier: Apache-2.0
"""docs/howto/dask.md: a worker that pages, in a cluster of Dask's."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, free_port
from support.documents import Block, marked
from support.guides import PAGED, shell, skip_without
from support.machine.ran import ran
from support.machine.usershell import Service, search_path

GUIDE = Path("docs/howto/dask.md")
CLIENT = """
import sys
import dask.array as da
from distributed import Client

with Client(sys.argv[1]) as client:
    table = da.random.random((100_000, 1_000), chunks=(1_000, 1_000)).persist()
    print(int((table < 2).sum()), len(client.scheduler_info()["workers"]))
"""

pytestmark = [*NEEDS_SWAP, pytest.mark.full, pytest.mark.requires_tool("bash")]


def test_a_worker_pages_to_donors(cluster: Cluster) -> None:
    skip_without(["dask", "distributed"])
    cluster.donor()
    port = str(free_port())
    env = {**cluster.env, "PATH": search_path(cluster.root / "bin", "")}
    here = {"10.0.0.2": "127.0.0.1", "8786": port}

    def service(found: list[Block], serving: str) -> Service:
        (block,) = found
        log = cluster.root / f"{block.mark}.log"
        return Service(shell(block, here), log, serving, env, cluster.root)

    device = cluster.start("--swap", name="swap0", size="1536M")
    scheduler = service(marked(GUIDE, "on", "cluster"), f"127.0.0.1:{port}")
    try:
        worker = service(marked(GUIDE, "on", "worker"), "Registered to")
        try:
            argv = (sys.executable, "-c", CLIENT, f"tcp://127.0.0.1:{port}")
            done = ran(*argv, env=env, wait_s=2 * WAIT_S)
            assert done.stdout == "100000000 1\n", done.stdout + done.stderr
        finally:
            worker.end(signal.SIGTERM)
        assert PAGED.search(worker.log), worker.log
    finally:
        scheduler.end(signal.SIGTERM)
        device.remove()
