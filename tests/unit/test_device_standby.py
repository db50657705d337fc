# SPDX-License-Identifier: Apache-2.0
"""What a standby says when it cannot take over, whatever the reason."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from infiniswap import logs
from infiniswap.device import __main__ as process
from infiniswap.device.succession.holder import Holder
from infiniswap.device.succession.standby import HopelessError
from infiniswap.errors import SystemCallError


class Gone(BaseException):
    """The process has ended."""


class Told(Holder):
    """A holder that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.unsaid = b""

    def refused(self, why: str) -> None:
        self.said.append(f"refused {why}")

    def hopeless(self, why: str) -> None:
        self.said.append(f"hopeless {why}")

    def keep_bytes(self, name: str, data: bytes) -> None:
        assert name == "unsaid"
        self.unsaid = data


@pytest.fixture
def log() -> Iterator[int]:
    """What this process's log would be, to read from; its lines are held, as in a take-over."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    handler = logs.AsideHandler(ends[1])
    logging.getLogger().addHandler(handler)
    logs.hold()
    yield ends[0]
    logging.getLogger().removeHandler(handler)
    handler.close()
    for end in ends:
        os.close(end)


@pytest.fixture(autouse=True)
def _no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(code: int) -> NoReturn:
        raise Gone(code)

    monkeypatch.setattr(process, "_vanish", vanish)


def test_an_error_of_ours_goes_to_the_next_one(log: int) -> None:
    holder, error = Told(), SystemCallError("no such device")
    with pytest.raises(Gone, match=str(error.exit_code)):
        process._give_up(holder, error)
    assert holder.said == ["refused no such device"]
    assert holder.unsaid == b"no such device\n"
    with pytest.raises(BlockingIOError):
        os.read(log, 100)


def test_so_does_what_nobody_has_thought_of(log: int) -> None:
    holder = Told()
    try:
        raise KeyError("state")
    except KeyError as error:
        with pytest.raises(Gone, match="1"):
            process._give_up(holder, error)
    assert holder.said == ["refused 'state'"]
    assert b"Traceback" in holder.unsaid
    with pytest.raises(BlockingIOError):
        os.read(log, 100)


def test_when_nobody_comes_any_more_it_is_said_at_once(log: int) -> None:
    holder = Told()
    with pytest.raises(Gone):
        process._give_up(holder, HopelessError("the state is damaged"))
    assert holder.said == ["hopeless the state is damaged"]
    assert os.read(log, 100) == b"the state is damaged\n"
