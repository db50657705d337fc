# SPDX-License-Identifier: Apache-2.0
"""As much of a device process as outlives a kill -9: engine with a state file, mapper, one donor.

    state_device.py first|standby FD BACKUP DONOR SOCKET SIZE SLAB

It serves NBD on SOCKET and prints a line of JSON about itself ten times a second; a standby one
when it is ready, and the others after it was sent a line. BACKUP may be `none`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

from infiniswap.config import DeviceConfig, PolicyConfig
from infiniswap.control.client import ClientConfig, Identity
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.slabs.after_take_over import restore_links
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.protocol import EngineConfig, FrontendConfig
from infiniswap.policy.refill import Refill
from infiniswap.units import PAGE_BYTES, HostPort

_DEVICE_ID = "00000000-0000-0000-0000-0000000000aa"


def _make_engine(role: str, fd: int, backup: str | None, size: int, slab: int) -> NativeEngine:
    config = EngineConfig(
        size_bytes=size,
        slab_bytes=slab,
        staging_pages=1024,
        no_backup=backup is None,
        standby=role == "standby",
        state_fd=fd,
    )
    if role == "first":
        return NativeEngine(config, backup)
    engine = NativeEngine(config, None)
    print(json.dumps({"state": "standby"}), flush=True)
    sys.stdin.readline()
    engine.take_over(backup)
    return engine


async def _run(role: str, fd: str, backup: str, donor: str, path: str, *sizes: str) -> None:
    size, slab = map(int, sizes)
    has_backup = backup != "none"
    engine = _make_engine(role, int(fd), backup if has_backup else None, size, slab)
    now_s = asyncio.get_running_loop().time()
    mapper = SlabMapper(
        engine,
        size // slab,
        PolicyConfig(activity_alpha=0.5, period_s=0.2, hot_pages_per_s=1.0),
        Random(1),
        now_s,
        Refill(100_000.0 if has_backup else 0.0, now_s),
        slab // PAGE_BYTES,
    )
    config = LinkConfig(
        identity=Identity(_DEVICE_ID, "state", "here"),
        client=ClientConfig(secret=None),
        device=DeviceConfig(transport="tcp", slab_bytes=slab, connect_ms=10_000, request_ms=10_000),
        suspend_s=20.0,
        slab_count=size // slab,
        has_backup=has_backup,
    )
    with ThreadPoolExecutor(2) as executor:

        def make_link(address: HostPort) -> DonorLink:
            return DonorLink(address, engine, mapper, config, executor)

        host, _, port = donor.rpartition(":")
        mapper.lenders.links = [make_link(HostPort(host, int(port)))]
        if role == "standby":
            restore_links(engine, mapper, make_link)
        else:
            for number in range(size // slab):
                assert await mapper.placer.place(number)
        mapper.is_eager = not has_backup
        task = asyncio.create_task(mapper.run(), name="mapper")
        while not has_backup and mapper.lenders.links[0].state != "mapped":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.frontend("nbd-socket", FrontendConfig(path=path))
        while not task.done():
            link = mapper.lenders.links[0]
            lease = link.connections.lease
            about = {
                "state": link.state,
                "slabs": len(link.mapped),
                "lease": lease and lease.lease,
                "epoch": lease and lease.epoch,
                "valid": sum(info.remote_valid_pages for info in engine.slabs()),
                "stats": engine.stats(),
            }
            print(json.dumps(about), flush=True)
            await asyncio.sleep(0.1)
        task.result()


if __name__ == "__main__":
    asyncio.run(_run(*sys.argv[1:]))
