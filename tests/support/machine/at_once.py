# SPDX-License-Identifier: Apache-2.0
"""An OffLoop (infiniswap.engine.protocol) without a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def at_once(call: Callable[[], T]) -> T:
    """On the loop, as a call that does not block may be."""
    return call()
