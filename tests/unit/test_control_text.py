# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.text, and that every string of a peer goes through it."""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.donors.hostile_donor import EVIL
from support.messages import texts, values

from infiniswap.control import messages as m
from infiniswap.control.text import VALUE_LENGTH_MAX, clean_text, cleaned, is_plain
from infiniswap.device.api import ANSWER_BYTES_MAX
from infiniswap.device.control import client, listing
from infiniswap.device.spec.rundir import DevicePaths, running_names, stopped_names, take_lock
from infiniswap.errors import ConflictError, InfiniswapError, ProtocolMismatchError

BODIES = (m.Status, m.DrainInfo, m.VersionInfo, m.NonceInfo, m.HttpError)
FRAMES = (*m.TO_CONSUMER, *m.TO_DONOR)
TEXTS = st.text() | st.sampled_from([EVIL, "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ufeff"])


@pytest.mark.parametrize("kind", [*BODIES, *FRAMES])
@settings(max_examples=30)
@given(data=st.data(), escaped=st.booleans())
def test_every_text_of_a_peer_is_clean_or_refused(
    kind: Any, data: st.DataObject, escaped: bool
) -> None:
    shown = json.dumps(data.draw(values(kind, TEXTS)), ensure_ascii=escaped)
    said = shown.encode("utf-8", "replace")
    for decode in (m.decode_to_consumer, m.decode_to_donor, lambda body: m.decode_body(body, kind)):
        found: Any
        try:
            found = decode(said)
        except ProtocolMismatchError as error:
            found = str(error)
        for each in texts(msgspec.to_builtins(found)):
            assert each.isprintable(), ascii(each)


@given(st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_what_needs_no_cleaning_is_told_from_its_json(value: Any) -> None:
    for encoded in (msgspec.json.encode(value), msgspec.json.encode(value).decode()):
        if is_plain(encoded):
            assert cleaned(value) == value
    assert all(text.isprintable() for text in texts(cleaned(value)))
    assert not is_plain(json.dumps(EVIL))
    assert is_plain(b'{"type":"ping","id":7}')


def test_a_text_of_a_peer_has_an_end() -> None:
    assert len(clean_text("x" * 1000)) == 512
    assert len(cleaned({"a": ["x" * 10_000]})["a"][0]) == VALUE_LENGTH_MAX


@contextlib.contextmanager
def impostor(root: Path, answer: bytes) -> Iterator[DevicePaths]:
    """Another user's process answers so where a device's socket is expected."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with contextlib.suppress(OSError):
                self.request.sendall(b"HTTP/1.1 409 No\r\n\r\n" + answer)

    paths = DevicePaths("d1", root / "run/d1", root / "store")
    lock = take_lock(paths)
    with socketserver.UnixStreamServer(str(paths.socket), Answer) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield paths
        server.shutdown()
        serving.join()
    os.close(lock)


def test_no_text_of_a_device_moves_the_terminal(tmp_path: Path) -> None:
    with impostor(tmp_path, json.dumps({"error": EVIL, "exit_code": 1}).encode()) as paths:
        with pytest.raises(InfiniswapError) as caught:
            client.status(paths)
        assert str(caught.value).isprintable()
        (row,) = listing.local_devices(paths.run.parent, paths.store)
        assert str(row["state"]).isprintable()


def test_a_device_that_answers_without_end_does_not_answer(tmp_path: Path) -> None:
    answer = b'{"error": "' + b"x" * ANSWER_BYTES_MAX + b'"}'
    with (
        impostor(tmp_path, answer) as paths,
        pytest.raises(ConflictError, match="an answer of more than"),
    ):
        client.status(paths)


def test_a_directory_with_another_name_is_no_device(tmp_path: Path) -> None:
    for name in ("d1", "\x1b[31m", "a b", "\u202eevil"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.device").touch()
    os.close(take_lock(DevicePaths("d1", tmp_path / "d1", tmp_path)))
    assert running_names(tmp_path) == []
    assert stopped_names(tmp_path, tmp_path) == ["d1"]
