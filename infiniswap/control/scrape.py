# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics`: who may read them, and the answer."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Final

from infiniswap.control import auth
from infiniswap.control.figures import PAGE_TYPE, Figures
from infiniswap.control.http import web
from infiniswap.control.roles import Role

READERS: Final = frozenset({Role.CONSUMER, Role.OPERATOR})
"""Who may read metrics and status, where certificates take the place of the secret."""

UNAUTHORIZED: Final = "the metrics token is missing or wrong (Authorization: Bearer TOKEN)"


def may_scrape(request: web.Request, token: bytes | None) -> bool:
    """Whether the request shows the metrics token; False where there is none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return auth.proofs_equal(given.strip(), token.decode(errors="replace"))


async def answer(figures: Callable[[], Figures]) -> web.Response:
    """The page, of figures that are at hand: it waits for no other process."""
    # In a thread: the first import of the format's library takes a while.
    module = await asyncio.to_thread(importlib.import_module, "infiniswap.control.exposition")
    body: bytes = module.page(figures())
    return web.Response(body=body, headers={"Content-Type": PAGE_TYPE})
