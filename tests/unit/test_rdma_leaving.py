# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.rdma_leaving: looked for whatever happens, and told once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from infiniswap.device.donors.rdma_leaving import let_go
from infiniswap.errors import EngineError

T = TypeVar("T")


async def _blocking(call: Callable[[], T]) -> T:
    return call()


async def test_a_device_that_is_removed_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = [0, None, 1, 0, 0]

    class Engine:
        def rdma_let_go(self) -> int:
            answer = answers.pop(0)
            if answer is None:
                raise EngineError("the engine is closed", code=9)
            return answer

    async def sleep(pause_s: float) -> None:
        assert pause_s > 0
        if not answers:
            raise asyncio.CancelledError

    with contextlib.suppress(asyncio.CancelledError):
        await let_go(cast(Any, Engine()), _blocking, sleep)
    assert not answers
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "being removed" in caplog.text
