# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.process.tend: another key in time, and what is told where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import Any, cast

import pytest
from support.configs import configured
from support.devices.specs import device_spec
from support.machine.virtual_time import in_virtual_time

from infiniswap import events
from infiniswap.device.process.tend import TEND_S, tend_key
from infiniswap.device.spec.device_key import DeviceKey
from infiniswap.errors import EngineError

SPEC = device_spec(configured())


class Engine:
    """Answers each call with the next of these; then there is no need."""

    def __init__(self, *answers: bool | int) -> None:
        self.answers = list(answers)
        self.asked = 0

    def seal_tend(self) -> bool:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else False
        if not isinstance(answer, bool):
            raise EngineError("no other key", code=answer)
        return answer


@in_virtual_time
async def test_a_key_without_a_successor_is_told_once_and_until_there_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, key = Engine(True, errno.ENOSPC, errno.ENOSPC, False, errno.ENOSPC), DeviceKey()
    caplog.set_level("INFO")
    seen = []
    task = asyncio.create_task(tend_key(cast(Any, engine), key))
    await asyncio.sleep(TEND_S / 2)
    for _ in range(5):
        await asyncio.sleep(TEND_S)
        seen.append([said.partition(":")[0] for said in key.degraded(SPEC)])
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert engine.asked == 5
    assert seen == [[], ["seal-keys"], ["seal-keys"], [], ["seal-keys"]]
    records = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in records if level != "DEBUG"] == ["INFO", "WARNING", "WARNING"]
    fields = [getattr(record, events.FIELD, None) for record in caplog.records]
    assert sum(bool(field) for field in fields) == 2
