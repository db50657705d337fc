# SPDX-License-Identifier: Apache-2.0
"""What a service says to the service manager that started it: sd_notify(3) and its watchdog.

The protocol is one datagram of `NAME=value` lines to the socket in NOTIFY_SOCKET; that is all
there is to it, so no library is needed. Without that variable the service sends nothing, and no
failure to send ends it: a service must not end because nobody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

_PINGS_PER_PERIOD = 3.0


class Notifier:
    """Speaks to the service manager, if there is one.

    Args:
        environ: None: the process's own.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        address = env.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is in the abstract name space, whose names begin with NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = env.get("WATCHDOG_USEC", "")
        meant = env.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if usec.isdecimal() and meant else 0.0
        """Silence after which the manager takes this process for stuck; 0.0: never."""

    @property
    def managed(self) -> bool:
        """Whether a service manager listens."""
        return bool(self._address)

    def say(self, *lines: str) -> None:
        """Sends lines such as `READY=1`; nothing happens where nobody listens."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)

    def ready(self, status: str) -> None:
        """It serves; `status` is what `systemctl status` shows."""
        self.say("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """It reads its configuration again; `ready` ends that."""
        self.say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "stopping") -> None:
        """It is ending on purpose."""
        self.say("STOPPING=1", f"STATUS={status}")

    async def watchdog(self, healthy: Callable[[], bool] = lambda: True) -> None:
        """Tells the manager, as often as it wants to hear it, that the event loop turns.

        Args:
            healthy: asked each time; the manager hears nothing while it says no.
        """
        if not self.managed or self.watchdog_s <= 0:
            return
        while True:
            if healthy():
                self.say("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / _PINGS_PER_PERIOD)
