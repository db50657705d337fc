# SPDX-License-Identifier: Apache-2.0
"""A device process from its start to its end, with nothing around it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infiniswap.device.process import life
from infiniswap.device.process.service import DeviceService
from infiniswap.device.spec import contents
from infiniswap.errors import MemoryLimitError
from infiniswap.system import programs, systemd
from infiniswap.system.signals import stop_signals


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


class Refusing:
    """A device whose programs end after it has refused to stop a few times."""

    def __init__(self, refusals: int) -> None:
        self.spec: Any = None
        self.stopped = asyncio.Event()
        self.left, self.asked = refusals, 0

    def interrupt_start(self) -> bool:
        """It serves already."""
        return False

    async def stop(self, *, remove: bool) -> None:
        """Refuses while programs are left."""
        self.asked += 1
        if self.left:
            self.left -= 1
            raise MemoryLimitError(f"{self.left + 1} MiB do not fit")
        self.stopped.set()


@pytest.mark.parametrize("host", ["goes down", "stays up"])
async def test_a_refused_stop_is_tried_again_at_a_shutdown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """systemd asks a device that was started by hand once and hears no refusal. A person does."""
    goes_down = host == "goes down"
    monkeypatch.setattr(contents, "keeps_record", lambda _: True)
    monkeypatch.setattr(life, "_STOP_PAUSE_S", 0.001)
    answers: list[bool] = []

    def is_stopping() -> bool:
        answers.append(goes_down)
        return goes_down

    monkeypatch.setattr(systemd, "is_stopping", is_stopping)
    service = Refusing(3)
    async with life._signals(cast(DeviceService, service)), asyncio.timeout(60):
        os.kill(os.getpid(), signal.SIGTERM)
        if goes_down:
            await service.stopped.wait()
        else:
            while not answers:  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
    assert service.asked == (4 if goes_down else 1)
    assert len(answers) == (3 if goes_down else 1)  # after refusals only
    assert caplog.text.count("not stopped") == 1


async def test_a_program_that_is_started_meanwhile_can_be_ended() -> None:
    """What a process blocks, the programs that it starts would block as well."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    async with stop_signals(lambda _number, _sender: None):
        sleeper = programs.start(["sleep", "1000"])
        sleeper.terminate()
        assert await asyncio.to_thread(sleeper.wait, 60) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_garbage_is_not_looked_for_in_what_lives_as_long_as_the_process(
    service: list[Service],
) -> None:
    """Looking through it took 30 ms, for which a mapping had to wait."""
    spec: Any = SimpleNamespace(name="vm0")
    assert asyncio.run(life.serve(spec, lambda _: True, own_log=False)) == 0
    assert service[0].frozen > len(service[0].made)
