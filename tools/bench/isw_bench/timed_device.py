# SPDX-License-Identifier: Apache-2.0
"""`infiniswap device start` that times every slab it maps.

    ISW_BENCH_TIMES=FILE python -m isw_bench.timed_device device start NAME OPTIONS

The device's own process, but that `Placer.place`, which is all of it from the wish for a donor to
the slab being mapped, writes a line of JSON to the file for each slab that found one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from infiniswap.cli.device import options
from infiniswap.cli.main import build_parser
from infiniswap.device.process.life import prepare_process, serve
from infiniswap.device.slabs import mapper
from infiniswap.device.slabs.placer import Placer, Purpose
from infiniswap.device.spec import rundir
from infiniswap.units import parse_page_size

VARIABLE = "ISW_BENCH_TIMES"


class TimedPlacer(Placer):
    """Tells how long it took."""

    async def place(self, slab: int, purpose: Purpose = Purpose.NEED) -> bool:
        """See Placer."""
        links = self._known_donors.links
        holding = [link for link in links if link.mapped]
        start_s = time.monotonic()
        mapped = await super().place(slab, purpose)
        if mapped:
            took_ms = (time.monotonic() - start_s) * 1e3
            is_first = len([link for link in links if link.mapped]) > len(holding)
            _note({"map_ms": took_ms, "is_first": is_first})
        return mapped


def _note(told: dict[str, Any]) -> None:
    with open(os.environ[VARIABLE], "a", encoding="ascii") as file:
        file.write(json.dumps(told) + "\n")


def main(argv: list[str]) -> int:
    """Runs the device; returns its exit code."""
    vars(mapper)["Placer"] = TimedPlacer
    args = build_parser("device").parse_args(argv)
    config = options.load_config(args)
    size_bytes = parse_page_size(args.size)
    spec = options.make_spec(args, config, name=args.name, size_bytes=size_bytes, swap=args.swap)
    paths = rundir.paths_of(args.name, config.device.run_dir, config.device.backup_dir)
    options.prepare_backup_dir(spec, paths)
    prepare_process(own_log=False)
    return asyncio.run(serve(spec, lambda ready: ready.ok, own_log=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
