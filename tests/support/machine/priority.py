# SPDX-License-Identifier: Apache-2.0
"""Commands that leave the processors to whatever else wants them."""

from __future__ import annotations


def at_nice(nice: int) -> tuple[str, ...]:
    """Before a command that begins a session: its nice value.

    Most kernels share processors among sessions first, and by nice(2) only within each (sched(7),
    "The autogroup feature"): a session has a nice value of its own.
    """
    low = f'{{ echo {nice} >/proc/self/autogroup; }} 2>/dev/null; exec nice -n {nice} "$@"'
    return ("sh", "-c", low, "low")


LOWEST = at_nice(19)
