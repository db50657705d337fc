# SPDX-License-Identifier: Apache-2.0
"""What a daemon says when it can open no more files."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from infiniswap.donor.descriptors import ShortageLog


async def test_a_shortage_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 5.0
    handler, loop = ShortageLog(lambda: now_s), asyncio.get_running_loop()
    for _ in range(100):
        handler(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "too many")})
    (record,) = caplog.records
    assert "no more files can be opened" in record.message
    assert record.exc_info is None
    now_s += 61.0
    handler(loop, {"message": "accept", "exception": OSError(errno.ENFILE, "too many")})
    assert "the whole host" in caplog.records[1].message


async def test_everything_else_is_reported_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    failure = {"message": "a callback failed", "exception": OSError(5, "x")}
    with caplog.at_level(logging.ERROR):
        ShortageLog()(asyncio.get_running_loop(), failure)
    assert "a callback failed" in caplog.text
