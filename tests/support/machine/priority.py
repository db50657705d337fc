# SPDX-License-Identifier: Apache-2.0
"""Commands that leave the processors to whatever else wants them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def at_nice(nice: int) -> tuple[str, ...]:
    """Before a command that begins a session: its nice value.

    Most kernels share processors among sessions first, and by nice(2) only within each (sched(7),
    "The autogroup feature"): a session has a nice value of its own.
    """
    low = f'{{ echo {nice} >/proc/self/autogroup; }} 2>/dev/null; exec nice -n {nice} "$@"'
    return ("sh", "-c", low, "low")


LOWEST = at_nice(19)


def give_usual_share(session: int) -> None:
    """Takes back what `at_nice` has set, for a command that leads this session."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, session, 0)
    with contextlib.suppress(OSError):
        Path("/proc", str(session), "autogroup").write_text("0")
