# SPDX-License-Identifier: Apache-2.0
"""The command line of every benchmark: `python -m isw_bench SUITE ...` (see the Makefile)."""

from __future__ import annotations

import importlib
import sys

from isw_bench import suite

SUITES = ("peers", "faults", "frontends", "rdma")
"""Rooms of this package, each with a SUITE."""
COMMANDS = {
    "apps": "isw_bench.apps.command",
    "before": "isw_bench.before",
    "plan": "isw_bench.planning.score",
    "record": "isw_bench.far.record",
}
"""What has a command line of its own, and where it is."""


def main() -> int:
    """Returns the exit code."""
    known = (*SUITES, *COMMANDS)
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        print(f"bench: name one of {', '.join(known)} first", file=sys.stderr)
        return 2
    if sys.argv[1] in COMMANDS:
        command = importlib.import_module(COMMANDS[sys.argv[1]])
        return int(command.main(sys.argv[2:]))
    module = importlib.import_module(f"isw_bench.{sys.argv[1]}")
    return suite.main(module.SUITE, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
