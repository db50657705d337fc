# SPDX-License-Identifier: Apache-2.0
"""Keeps processors awake while a counter of page-ins grows fast: for devices and donors alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from infiniswap.policy.wakeup import Wakefulness, WakefulnessConfig
from infiniswap.system.process import Degraded
from infiniswap.system.wakeup import CpuLatencyRequest, idle_host

log = logging.getLogger(__name__)

_TICK_S_AWAKE = 0.1
_TICK_S_ASLEEP = 0.25
_RETRY_TICKS = 240
"""After a refusal: about a minute."""


class Waker:
    """Holds the request while it is worth it. `run` is one task of an event loop.

    Args:
        page_ins: total since the start; must not wait.
        mode: "auto" or "off" (keep_awake).
        config: when it is worth it.
        request: the kernel's, or a test's.
        latency_us: what to ask for; None: nothing would help on this host.
    """

    def __init__(
        self,
        page_ins: Callable[[], int],
        mode: str,
        config: WakefulnessConfig | None = None,
        request: CpuLatencyRequest | None = None,
        latency_us: Callable[[], int | None] = lambda: idle_host().latency_us,
    ) -> None:
        self._page_ins = page_ins
        self._policy = Wakefulness(config or WakefulnessConfig())
        self._request = request or CpuLatencyRequest()
        self._find_latency_us = latency_us
        self._latency_us: int | None = None
        self._retry_ticks = 0
        self._mode = "off"
        self._changed = asyncio.Event()
        self.set_mode(mode)

    def set_mode(self, mode: str) -> None:
        """ "auto" or "off" from now on."""
        if mode == self._mode:
            return
        self._mode = mode
        self._latency_us = self._find_latency_us() if mode == "auto" else None
        if self._latency_us is not None:
            self._request.check()
        self._changed.set()

    @property
    def awake(self) -> bool:
        """Whether the request is held now."""
        return self._request.held is not None

    @property
    def problem(self) -> Degraded | None:
        """Why it cannot be held; None when it can, or is not wanted."""
        return self._request.problem

    async def run(self) -> None:
        """Ticks until cancelled; then nothing is held any more."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._changed.is_set() and self._request.problem is not None:
                    log.warning("%s", self._request.problem)
                self._changed.clear()
                if self._latency_us is None:
                    self._request.release()
                    await self._changed.wait()
                    continue
                self.tick(loop.time())
                await asyncio.sleep(_TICK_S_AWAKE if self.awake else _TICK_S_ASLEEP)
        finally:
            self._request.close()

    def tick(self, now_s: float) -> None:
        """Looks at the counter and holds or releases."""
        if self._latency_us is None:
            return
        if not self._policy.tick(now_s, self._page_ins()):
            self._request.release()
            return
        if self._retry_ticks:
            self._retry_ticks -= 1
        elif self._request.hold(self._latency_us) is not None:
            self._retry_ticks = _RETRY_TICKS
