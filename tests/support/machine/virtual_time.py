# SPDX-License-Identifier: Apache-2.0
"""An event loop on which time passes only while everybody waits, and then at once."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class _Selector(selectors.EpollSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout != 0:
            assert timeout is not None, "everybody waits, and nothing is going to happen"
            self._loop.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Real file descriptors, somebody else's time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorates a test: it runs on a loop of its own that begins at 0 s."""

    @functools.wraps(test)
    def timed(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return timed
