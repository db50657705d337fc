# SPDX-License-Identifier: Apache-2.0
"""Processes that stand still for a while."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """They do nothing, and leave the processors to others."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
