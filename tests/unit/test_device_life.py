# SPDX-License-Identifier: Apache-2.0
"""A device process from its start to its end, with nothing around it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from infiniswap.device.process import life
from infiniswap.device.spec import contents


class Service:
    """A device that stops as soon as it serves."""

    def __init__(self, spec: Any, **_: Any) -> None:
        self.spec = spec
        self.was_kept = True
        self.stopped = asyncio.Event()
        self.made: list[list[int]] = []
        self.frozen = 0

    def load(self) -> None:
        """Nothing."""

    async def start(self) -> Any:
        """Makes what lives as long as the process."""
        self.made = [[number] for number in range(100)]
        return SimpleNamespace(path="/dev/null")

    def begin(self) -> bool:
        """Looks at what collections of garbage leave out."""
        self.frozen = gc.get_freeze_count()
        looked_at = {id(each) for each in gc.get_objects()}
        assert not looked_at & {id(each) for each in self.made}
        self.stopped.set()
        return True


@contextlib.asynccontextmanager
async def nothing(*_: Any, **__: Any) -> AsyncIterator[str]:
    yield ""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Service]]:
    made: list[Service] = []

    def make(*args: Any, **options: Any) -> Service:
        made.append(Service(*args, **options))
        return made[-1]

    monkeypatch.setattr(life, "DeviceService", make)
    monkeypatch.setattr(contents, "keeps_record", lambda _: True)
    for name in ("_signals", "metrics_port", "control_socket", "member_socket"):
        monkeypatch.setattr(life, name, nothing)
    yield made
    gc.unfreeze()


def test_garbage_is_not_looked_for_in_what_lives_as_long_as_the_process(
    service: list[Service],
) -> None:
    """Looking through it took 30 ms, for which a mapping had to wait."""
    spec: Any = SimpleNamespace(name="vm0")
    assert asyncio.run(life.serve(spec, lambda _: True, own_log=False)) == 0
    assert service[0].frozen > len(service[0].made)
