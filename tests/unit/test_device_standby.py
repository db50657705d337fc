# SPDX-License-Identifier: Apache-2.0
"""A standby that finds nothing of its predecessor's, and what it says when it cannot take over."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from support.devices.holder_pair import Pair, said

from infiniswap import logs
from infiniswap.control.messages import VERSIONS
from infiniswap.device import __main__ as process
from infiniswap.device.succession.hand_over import read_kept
from infiniswap.device.succession.holder import read_all
from infiniswap.device.succession.standby import HopelessError, prepare_front_end
from infiniswap.errors import (
    ConfigError,
    EngineError,
    InfiniswapError,
    NotFoundError,
    SystemCallError,
)

ENGINE = cast(Any, None)
GONE = NotFoundError("there is no device of an earlier process")


class Gone(BaseException):
    """The process has ended."""


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


@pytest.mark.parametrize(
    ("error", "code", "words", "kept"),
    [
        (SystemCallError("no such device"), 10, "no such device", b"no such device\n"),
        (KeyError("state"), 1, "'state'", b"Traceback"),
    ],
)
def test_any_error_goes_to_the_next_one(
    log: int, holder_pair: Pair, error: Exception, code: int, words: str, kept: bytes
) -> None:
    holder, theirs = holder_pair

    def fail() -> None:
        try:
            raise error
        except Exception as raised:
            process._give_up(holder, raised)

    with pytest.raises(Gone, match=str(code)):
        fail()
    text, (fd,) = said(theirs)
    assert text == "keep unsaid"
    assert kept in read_all(fd)
    os.close(fd)
    assert said(theirs) == (f"refused {words}", [])
    with pytest.raises(BlockingIOError):
        os.read(log, 100)


def test_when_nobody_comes_any_more_it_is_said_at_once(log: int, holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    with pytest.raises(Gone):
        process._give_up(holder, HopelessError("the state is damaged"))
    assert said(theirs) == ("hopeless the state is damaged", [])
    assert os.read(log, 100) == b"the state is damaged\n"


def attachment(*failures: InfiniswapError) -> Any:
    """One whose front end fails so, and then can be prepared."""
    left = list(failures)

    def prepare(_engine: object, _note: bytes) -> None:
        if left:
            raise left.pop(0)

    return SimpleNamespace(kernel=SimpleNamespace(prepare=prepare), left=left)


def test_what_is_gone_for_good_is_hopeless_and_what_this_process_cannot_do_is_not() -> None:
    one = attachment(GONE)  # for a moment
    assert prepare_front_end(one, ENGINE, b"", look_again_s=0.0) == one
    assert not one.left
    for error, kind in ((GONE, HopelessError), (EngineError("other code", code=1), EngineError)):
        with pytest.raises(kind, match=error.what):
            prepare_front_end(attachment(GONE, error), ENGINE, b"", look_again_s=0.0)


def test_no_standby_for_a_process_of_another_protocol_version() -> None:
    """Its leases are with donors that would not talk to a successor of this release."""
    note = base64.b64encode(b"note").decode()
    for extra, version in ({}, 1), ({"protocol": 9}, 9):
        kept = json.dumps({"spec": {}, "note": note, **extra}).encode()
        with pytest.raises(ConfigError, match=f"protocol version {version}, which") as caught:
            read_kept(kept)
        assert "Until then the old process goes on" in caught.value.mend
    kept = json.dumps({"spec": {}, "note": note, "protocol": max(VERSIONS)}).encode()
    with pytest.raises(ConfigError, match="record of this device"):
        read_kept(kept)
