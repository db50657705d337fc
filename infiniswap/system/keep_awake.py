# SPDX-License-Identifier: Apache-2.0
"""Keeps processors awake while pages come in fast (`keep_awake`): for devices and donors alike.

A process that writes a number of microseconds (a 32-bit integer) to /dev/cpu_dma_latency asks for
idle states that can be left within that time. The request lasts as long as the file is open, so it
ends with the process, however that ends (Documentation/power/pm_qos_interface.rst). What the idle
states of a host are: Documentation/admin-guide/pm/cpuidle.rst.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.policy.keep_awake import KeepAwakeConfig, KeepAwakePolicy
from infiniswap.system.files import PROC, SYS, try_read_text
from infiniswap.system.process import Degraded
from infiniswap.ticks import tick_pause_s

log = logging.getLogger(__name__)

REQUEST_PATH: Final = Path("/dev/cpu_dma_latency")
HALTPOLL: Final = "haltpoll"

_NO_DRIVER = ("", "none")
_POLL = "POLL"
_STATES_MAX = 10  # CPUIDLE_STATE_MAX
_TICK_S_AWAKE = 0.1
_TICK_S_ASLEEP = 0.25
_TICK_S_RESTING = 1.0
_RETRY_TICKS = 240
"""After a refusal: about a minute."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """One idle state of the first processor; `latency_us` is the time to leave it."""

    name: str
    latency_us: int


@dataclass(frozen=True, slots=True)
class IdleHost:
    """How this host's processors idle.

    Attributes:
        driver: of cpuidle: "intel_idle", "haltpoll", ...; "" where there is none.
        governor: what chooses among the states.
        states: from the shallowest; POLL, where there is one, does not sleep at all.
        is_guest: whether this is a virtual machine, where sleeping means leaving it.
    """

    driver: str
    governor: str
    states: tuple[IdleState, ...]
    is_guest: bool

    @property
    def sleeping(self) -> tuple[IdleState, ...]:
        """The states in which a processor sleeps."""
        return tuple(state for state in self.states if state.name != _POLL)

    @property
    def latency_us(self) -> int | None:
        """What to ask for; None where the kernel would not heed it.

        In a guest whose only way to sleep is to halt, every sleep is a trip to the hypervisor, and
        one that the states' figures do not tell: 0, which lets processors poll. Elsewhere the
        shallowest sleep and nothing deeper; never 0, which would forbid that one, too.
        """
        if not self.driver:
            return None
        sleeping = self.sleeping
        if self.driver == HALTPOLL or (self.is_guest and len(sleeping) <= 1):
            return 0
        if not sleeping:
            return None
        return max(1, min(state.latency_us for state in sleeping))


def idle_host(*, proc: Path = PROC, sys: Path = SYS) -> IdleHost:
    """How the processors of this host idle; what cannot be read counts as not there."""
    cpuidle = sys / "devices/system/cpu/cpuidle"
    driver = (try_read_text(cpuidle / "current_driver") or "").strip()
    governor = (
        try_read_text(cpuidle / "current_governor")
        or try_read_text(cpuidle / "current_governor_ro")
        or ""
    )
    states = []
    for number in range(_STATES_MAX):
        directory = sys / f"devices/system/cpu/cpu0/cpuidle/state{number}"
        name = try_read_text(directory / "name")
        latency = (try_read_text(directory / "latency") or "").strip()
        if name is None or not latency.isdecimal():
            break
        states.append(IdleState(name.strip(), int(latency)))
    flags = re.search(r"^flags\s*:(.*)$", try_read_text(proc / "cpuinfo") or "", re.MULTILINE)
    return IdleHost(
        driver="" if driver in _NO_DRIVER else driver,
        governor=governor.strip(),
        states=tuple(states),
        is_guest=flags is not None and "hypervisor" in flags[1].split(),
    )


class CpuLatencyRequest:
    """This process's request. Not thread-safe; release it.

    Args:
        path: the kernel's file.
    """

    def __init__(self, path: Path = REQUEST_PATH) -> None:
        self._path = path
        self._fd = -1
        self._latency_us: int | None = None
        self._problem: Degraded | None = None

    @property
    def held(self) -> int | None:
        """Microseconds asked for now; None: nothing."""
        return self._latency_us

    @property
    def problem(self) -> Degraded | None:
        """Why the last attempt failed; None when it did not."""
        return self._problem

    def check(self) -> Degraded | None:
        """Whether a request could be held; makes none."""
        if self._fd < 0:
            try:
                os.close(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC))
                self._problem = None
            except OSError as error:
                self._problem = self._refused(error)
        return self._problem

    def hold(self, latency_us: int) -> Degraded | None:
        """Asks for at most `latency_us` to wake up, or goes on asking; never raises.

        It takes microseconds and waits for nobody, so it may be called on an event loop.
        """
        if self._latency_us == latency_us:
            return None
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._fd, struct.pack("=i", latency_us))
        except OSError as error:
            self.release()
            self._problem = self._refused(error)
            return self._problem
        self._latency_us = latency_us
        self._problem = None
        return None

    def release(self) -> None:
        """Asks for nothing from now on. Idempotent."""
        fd, self._fd, self._latency_us = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def _refused(self, error: OSError) -> Degraded:
        mend = rights.mend("CAP_DAC_OVERRIDE")
        if isinstance(error, FileNotFoundError) or not rights.lacking("CAP_DAC_OVERRIDE"):
            mend = (
                f"In a container, pass it in (docker: --device {self._path}); elsewhere the kernel "
                "lacks it."
            )
        return Degraded(
            "keep-awake",
            f"processors cannot be kept awake while pages come in ({self._path}: "
            f"{error.strerror}); each page-in may wait for several to wake up",
            f'{mend} keep_awake = "off" does without.',
        )


class KeepAwake:
    """Keeps processors awake while that is worth it. `run` is one task of an event loop.

    Args:
        page_ins: total since the start; must not wait.
        mode: "auto" or "off" (keep_awake).
        config: when it is worth it.
        request: the kernel's, or a test's.
        latency_us: what to ask for; None: nothing would help on this host.
        rests: whether nothing comes in or goes out; `used` is called at the end of such a rest.
    """

    def __init__(
        self,
        page_ins: Callable[[], int],
        mode: str,
        config: KeepAwakeConfig | None = None,
        request: CpuLatencyRequest | None = None,
        latency_us: Callable[[], int | None] = lambda: idle_host().latency_us,
        rests: Callable[[], bool] = lambda: False,
    ) -> None:
        self._page_ins = page_ins
        self._rests = rests
        self._policy = KeepAwakePolicy(config or KeepAwakeConfig())
        self._request = request or CpuLatencyRequest()
        self._find_latency_us = latency_us
        self._latency_us: int | None = None
        self._retry_ticks = 0
        self._mode = "off"
        self._is_changed = False
        self._wake = asyncio.Event()
        self.set_mode(mode)

    def set_mode(self, mode: str) -> None:
        """ "auto" or "off" from now on."""
        if mode == self._mode:
            return
        self._mode = mode
        self._latency_us = self._find_latency_us() if mode == "auto" else None
        if self._latency_us is not None:
            self._request.check()
        self._is_changed = True
        self._wake.set()

    def used(self) -> None:
        """Pages come in or go out after a rest."""
        self._wake.set()

    @property
    def awake(self) -> bool:
        """Whether the request is held now."""
        return self._request.held is not None

    @property
    def problem(self) -> Degraded | None:
        """Why it cannot be held; None when it can, or is not wanted."""
        return self._request.problem

    async def run(self) -> None:
        """Ticks until cancelled, and then releases the request."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._is_changed and self._request.problem is not None:
                    log.warning("%s", self._request.problem)
                self._is_changed = False
                self._wake.clear()
                if self._latency_us is None:
                    self._request.release()
                    await self._wake.wait()
                    continue
                self.tick(loop.time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(loop.time())):
                        await self._wake.wait()
        finally:
            self._request.release()

    def _pause_s(self, now_s: float) -> float:
        if self.awake:
            return _TICK_S_AWAKE
        return tick_pause_s(now_s, _TICK_S_RESTING) if self._rests() else _TICK_S_ASLEEP

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
