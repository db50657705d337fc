# SPDX-License-Identifier: Apache-2.0
"""How a benchmark's command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from infiniswap.errors import InfiniswapError
from infiniswap.system.interrupts import Interrupted


def exit_code(run: Callable[[], int]) -> int:
    """Runs it; what users may do wrong, and Ctrl-C, become a line and an exit code."""
    try:
        return run()
    except InfiniswapError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as signal:
        print("bench: interrupted", file=sys.stderr)
        return int(signal.code or 0)
