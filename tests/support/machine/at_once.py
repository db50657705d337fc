# SPDX-License-Identifier: Apache-2.0
"""An OffLoop (infiniswap.engine.protocol) and an executor without a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


async def at_once(call: Callable[[], T]) -> T:
    """On the loop, as a call that does not block may be."""
    return call()


class AtOnce(Executor):
    """Runs each call when it is submitted, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
