# SPDX-License-Identifier: Apache-2.0
"""When processors should stay awake: while pages come in fast, and a little longer.

Waking a sleeping processor takes longer than fetching a page. Keeping it awake costs power, and in
a virtual machine processor time, so it has to be worth it and must end soon after.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeepAwakeConfig:
    """When to stay awake.

    Attributes:
        awake_pages_per_s: more page-ins than this, over one tick, are worth it.
        awake_s: how long after the last such tick, seconds.
    """

    awake_pages_per_s: float = 100.0
    awake_s: float = 1.0

    def __post_init__(self) -> None:
        if self.awake_pages_per_s < 0.0:
            raise ValueError(f"threshold {self.awake_pages_per_s} is below zero")
        if self.awake_s < 0.0:
            raise ValueError(f"time {self.awake_s} s is below zero")


class KeepAwakePolicy:
    """Decides from a counter of page-ins. The first tick only learns where the counter stands.

    Args:
        config: parameters.
    """

    def __init__(self, config: KeepAwakeConfig) -> None:
        self._config = config
        self._pages = 0
        self._ticked_s: float | None = None
        self._busy_s: float | None = None

    def tick(self, now_s: float, page_ins_total: int) -> bool:
        """Whether to be awake from now on.

        The page-ins of a tick that comes before any time has passed count with the next one.

        Args:
            now_s: seconds of the clock used throughout.
            page_ins_total: since the start; one that went down starts a new count from zero.
        """
        if self._ticked_s is None:
            self._ticked_s, self._pages = now_s, page_ins_total
        elapsed_s = now_s - self._ticked_s
        if elapsed_s > 0.0:
            before = self._pages if page_ins_total >= self._pages else 0
            if page_ins_total - before > self._config.awake_pages_per_s * elapsed_s:
                self._busy_s = now_s
            self._ticked_s, self._pages = now_s, page_ins_total
        return self._busy_s is not None and now_s - self._busy_s <= self._config.awake_s
