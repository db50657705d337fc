# SPDX-License-Identifier: Apache-2.0
"""`infiniswap daemon` that takes one slab back whenever it reads a line.

    python -m isw_bench.faults.evicting_donor daemon OPTIONS

Its own evictor does it, as it would for a host in need; the host's memory has no part in it. A line
`hurry` leaves its owner no time to copy it to another donor first, any other one does. Answers a
line of JSON: `slabs` it got, `evict_ms` from the wish to the memory being free, `ask_ms` of one
question to the owner alone, which is a round trip of the control session, `left` slabs that are
still lent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time

from infiniswap import config as configuration
from infiniswap.cli import daemon as command
from infiniswap.cli.main import build_parser
from infiniswap.donor import serve as donors
from infiniswap.donor.memory import memory_source
from infiniswap.donor.serve import Donor
from infiniswap.engine.native import NativeStore

_ASK_S_MAX = 1.0


async def evict_one(donor: Donor, urgent: bool) -> dict[str, float]:
    """Takes one slab back, and times that."""
    mapped = donor.service.lent.mapped()
    if not mapped:
        return {"slabs": 0, "evict_ms": 0.0, "ask_ms": 0.0, "left": 0}
    start_s = time.monotonic()
    await donor.service.lent.activity(mapped[0][0], _ASK_S_MAX)
    asked_s = time.monotonic()
    slabs = await donor.service.evict_some(1, urgent)
    return {
        "slabs": slabs,
        "evict_ms": (time.monotonic() - asked_s) * 1e3,
        "ask_ms": (asked_s - start_s) * 1e3,
        "left": len(donor.service.lent.mapped()),
    }


async def listen(donor: Donor, stop: asyncio.Event) -> None:
    """Answers line by line, until there are no more."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await evict_one(donor, line.strip() == b"hurry")), flush=True)
    stop.set()


async def serve(argv: list[str]) -> None:
    """The daemon, until its input ends or SIGTERM."""
    args = build_parser("daemon").parse_args(argv)
    config = configuration.load(args.config, command.overrides(args))
    memory = memory_source(args.memory_cgroup)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with donors.serve(config, NativeStore, memory) as donor:
        ports = {"control_port": donor.ports.control_port}
        temporary = args.ready_file.with_suffix(".new")
        temporary.write_text(json.dumps(ports))
        temporary.replace(args.ready_file)
        task = asyncio.create_task(listen(donor, stop), name="lines")
        task.add_done_callback(lambda _: stop.set())
        await donor.wait(stop)
        task.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(sys.argv[1:]))
