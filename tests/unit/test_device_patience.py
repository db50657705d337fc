# SPDX-License-Identifier: Apache-2.0
"""What a successor makes beside its service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from infiniswap.device.succession.patience import patiently
from infiniswap.errors import UnavailableError


async def test_it_is_tried_until_it_works_and_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [OSError("full"), OSError("full"), UnavailableError("gone")]
    events: list[str] = []
    made = asyncio.Event()

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[str]:
        events.append("try")
        if failures:
            raise failures.pop(0)
        made.set()
        try:
            yield "there"
        finally:
            events.append("closed")

    caplog.set_level(logging.INFO)
    async with patiently("page", make, retry_s=0.0):
        await made.wait()
        assert "closed" not in events
    assert events == ["try"] * 4 + ["closed"]
    said = [record.getMessage() for record in caplog.records if "page" in record.getMessage()]
    assert said == [
        "no page, tried again: full",
        "no page, tried again: gone",
        "page at there",
    ]


async def test_a_try_that_waits_ends_with_the_service() -> None:
    closed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            closed.set()

    async with patiently("page", make):
        await asyncio.sleep(0)
    assert closed.is_set()
