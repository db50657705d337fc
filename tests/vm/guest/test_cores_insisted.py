# SPDX-License-Identifier: Apache-2.0
"""Core files of a device's processes where root has lifted their limit: no page, and no key.

In a guest, as that takes CAP_SYS_RESOURCE. Without it: tests/integration/test_cores.py.
"""

from __future__ import annotations

import os
import resource
import signal

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import Cluster, until, wait_ended
from support.devices.nbd_client import connected
from support.devices.seal_keys import KEY_BYTES, key_in_clear
from support.machine.cores import gathered_cores
from support.machine.process_memory import memory_has

from infiniswap.units import PAGE_BYTES

pytestmark = [pytest.mark.timeout(1800), pytest.mark.full]

NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
MARKER_BYTES = 32


def test_a_core_has_neither_pages_nor_keys(cluster: Cluster) -> None:
    cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size="8M")
    marker, pid = os.urandom(MARKER_BYTES), device.pid
    with connected(device.socket) as client, gathered_cores() as cores:
        for number in range(64):
            page = marker * (PAGE_BYTES // MARKER_BYTES)
            assert nbd.write(client, number * PAGE_BYTES, page) == 0
        key = key_in_clear(device)
        assert memory_has(pid, key)
        assert memory_has(pid, marker)  # of the request that wrote it
        resource.prlimit(pid, resource.RLIMIT_CORE, NO_LIMIT)
        os.kill(pid, signal.SIGSEGV)
        wait_ended(pid)
        core = until(lambda: cores.of(pid).exists() and cores.of(pid).read_bytes(), "a core")
        print(f"{len(core)} bytes")
        assert key[: KEY_BYTES // 2] not in core
        assert key[KEY_BYTES // 2 :] not in core
        assert marker not in core
    device.remove()
