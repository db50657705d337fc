# SPDX-License-Identifier: Apache-2.0
"""Commands that leave the processors to whatever else wants them."""

from __future__ import annotations

# Most kernels share processors among sessions first, and by nice(2) only within each (sched(7),
# "The autogroup feature"): a session has a nice value of its own.
LOWEST = ("sh", "-c", '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$@"', "low")
"""Before a command: at the lowest priority. For one that begins a session."""
