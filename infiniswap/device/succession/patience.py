# SPDX-License-Identifier: Apache-2.0
"""Things that a successor can serve without for a while, such as its sockets: it says when one
cannot be made, and tries again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from infiniswap.errors import InfiniswapError

log = logging.getLogger(__name__)

_RETRY_S = 2.0


@contextlib.asynccontextmanager
async def patiently(
    what: str, make: Callable[[], AbstractAsyncContextManager[object]], retry_s: float = _RETRY_S
) -> AsyncIterator[None]:
    """Keeps a context open while this one is, from the moment at which that is possible.

    Args:
        what: its name, for the log.
        make: makes the context for each try; the context may return where it is.
        retry_s: pause between two tries, in seconds.
    """
    keeping = asyncio.create_task(_keep(what, make, retry_s), name=what)
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def _keep(
    what: str, make: Callable[[], AbstractAsyncContextManager[object]], retry_s: float
) -> None:
    told = ""
    while True:
        try:
            async with make() as where:
                if where:
                    log.info("%s at %s", what, where)
                await asyncio.Event().wait()
        except (InfiniswapError, OSError) as error:
            if str(error) != told:
                told = str(error)
                log.error("no %s, tried again: %s", what, error)
        await asyncio.sleep(retry_s)
