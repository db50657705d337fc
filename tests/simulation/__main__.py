# SPDX-License-Identifier: Apache-2.0
"""Runs seeds one after the other, for tests/unit/test_simulation.py.

    python -m simulation STATE_DIR SEED...

Prints what happened as JSON. Whatever a seed leaves behind that is reported only when it is
collected goes to the standard error, where nothing may be.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

from simulation.world import SimulationError, World


def main(state_dir: Path, seeds: list[int]) -> int:
    """Returns 1 at the first seed that fails, and names it."""
    # A daemon that is killed leaves calls behind that had not begun.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    happened: set[str] = set()
    migrated = 0
    traces = []
    for seed in seeds:
        world = World(seed, state_dir)
        try:
            traces.append(world.run())
        except SimulationError as error:
            print(json.dumps({"seed": seed, "error": str(error)}))
            return 1
        if not sum(device.reads for device in world.devices):
            print(json.dumps({"seed": seed, "error": "nothing was read"}))
            return 1
        gc.collect()
        happened |= set(world.faults.counts)
        migrated += world.pages_migrated
    print(json.dumps({"traces": traces, "happened": sorted(happened), "migrated": migrated}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]))
