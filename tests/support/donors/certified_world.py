# SPDX-License-Identifier: Apache-2.0
"""A donor in this process that goes by certificates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from infiniswap.control.roles import Role
from support.donors.certificates import Authority, settings
from support.donors.donor_world import WAIT_S, World, world


@contextlib.asynccontextmanager
async def donor(authority: Authority, **changes: Any) -> AsyncIterator[World]:
    """A donor with a certificate; `files` or others in place of its own."""
    files = changes.pop("files", None) or authority.files("donor1", [Role.DONOR])
    async with world(**{**settings(files), **changes}) as w, asyncio.timeout(WAIT_S):
        yield w


async def reload(w: World) -> None:
    """As SIGHUP, with an unchanged configuration."""
    config = w.donor.service.config
    outcome = await w.donor.reloader.reload(lambda: config)
    assert outcome.error is None
