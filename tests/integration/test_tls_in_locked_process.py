# SPDX-License-Identifier: Apache-2.0
"""TLS in a device's process, which is locked in memory and may serve swap space."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import tracemalloc
from pathlib import Path

import pytest
from support.donors.donor_world import SECRET, WAIT_S, world

from infiniswap.units import KIB

SUCCESSOR = """
import asyncio, os, sys
from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect, fetch_status
from infiniswap.device.process.take_over import prepare  # as a standby has imported it
from infiniswap.keys import parse
from infiniswap.units import parse_host_port

config = ClientConfig(parse(sys.argv[3].encode()), connect_s=30, request_s=30)
identity = Identity("00000000-0000-0000-0000-00000000000a", "swap0", "consumer")
address = parse_host_port(sys.argv[2])
os.chroot(sys.argv[1])
os.chdir("/")


async def main():
    peer = address.host
    async with await connect(address, identity, config, QuietHandler(), peer=peer) as session:
        await session.memory()
    assert not os.listdir("/")


asyncio.run(main())
"""


@pytest.mark.requires_root
@pytest.mark.requires_native
async def test_a_successor_opens_its_sessions_without_reading_a_file(tmp_path: Path) -> None:
    """All that it needs was loaded before: its root directory is empty by then."""
    empty = tmp_path / "empty"
    empty.mkdir()
    async with world() as w, asyncio.timeout(WAIT_S):
        successor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SUCCESSOR, str(empty), str(w.address), SECRET),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await successor.communicate()
        assert (successor.returncode, said.decode()) == (0, "")
        assert w.donor.server.counters["sessions_opened"] == 1


async def test_a_session_takes_little_memory() -> None:
    """Of both ends, as both are here. asyncio alone would take half a MiB."""
    count = 16
    async with world() as w, contextlib.AsyncExitStack() as held:
        for _ in range(4):  # what is made once
            await held.enter_async_context(await w.session())
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(count):
                await held.enter_async_context(await w.session())
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert taken / count < 128 * KIB
