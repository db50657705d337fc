# SPDX-License-Identifier: Apache-2.0
"""Open files of a daemon: a limit that fits its connections, and one log line when they run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from infiniswap import events

log = logging.getLogger(__name__)

_OTHERS = 128
"""Beside connections: listeners, log, wake-ups, the interpreter's own."""

_AGAIN_S = 60.0


def wanted_for(connections: int) -> int:
    """Files that a daemon with so many connections may have open."""
    return connections + _OTHERS


def allow(connections: int) -> None:
    """Raises the limit on open files as far as allowed, so that surplus connections are refused by
    the configured limits: without descriptors no connection at all is accepted."""
    wanted = wanted_for(connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "only %d files may be open, %d connections may want %d; raise the limit "
            "(LimitNOFILE=%d in the unit, or ulimit -Hn)",
            allowed,
            connections,
            wanted,
            wanted,
            extra=events.about(events.DESCRIPTORS_SHORT),
        )


class ShortageLog:
    """The event loop's exception handler.

    When no file can be opened, asyncio reports every connection it cannot accept with a traceback,
    and tries again a second later: strangers could fill the log. This handler logs one line a
    minute instead, and leaves everything else to the loop's own handler.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        now_s = self._clock()
        if now_s - self._said_s < _AGAIN_S:
            return
        self._said_s = now_s
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        whose = f"{soft} are allowed" if error.errno == errno.EMFILE else "the whole host's limit"
        log.error(
            "no more files can be opened (%s), so new connections to the control port wait; "
            "raise LimitNOFILE in the unit, or ulimit -Hn",
            whose,
            extra=events.about(events.DESCRIPTORS_SHORT),
        )
