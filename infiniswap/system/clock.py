# SPDX-License-Identifier: Apache-2.0
"""A clock to rely on, made of one that may jump."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from infiniswap import events

log = logging.getLogger(__name__)

AHEAD_S: Final = 300.0
"""Nobody who looks at the clock regularly sees it go on by so much at once."""


class SteadyClock:
    """Seconds that never run backwards.

    The kernel's monotonic clock should not need it. But the clock of a virtual machine that was
    moved or brought back from a snapshot has been seen to, and then whatever compares times would
    wait for as long as that. Time stands still while the clock below is behind; when it has jumped
    ahead it is believed: for a process that was stopped for an hour, an hour has passed.

    Args:
        read: the clock below, in seconds.

    Attributes:
        counters: has `clock_jumps`.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._last_s = read()
        self._offset_s = 0.0
        self.counters: Counter[str] = Counter()

    def __call__(self) -> float:
        """Now, in seconds."""
        now_s = self._read()
        step_s = now_s - self._last_s
        self._last_s = now_s
        if step_s < 0.0:
            self._offset_s -= step_s
            self._jumped("the clock went back by %.1f s; time goes on from where it was", -step_s)
        elif step_s > AHEAD_S:
            self._jumped("the clock went ahead by %.1f s, or this process was stopped", step_s)
        return now_s + self._offset_s

    def _jumped(self, text: str, step_s: float) -> None:
        self.counters["clock_jumps"] += 1
        log.warning(text, step_s, extra=events.about(events.CLOCK_STEPPED))
