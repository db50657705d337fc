# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.text, and that every string of a peer goes through it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.donors.hostile_donor import EVIL

from infiniswap.control import messages as m
from infiniswap.control.text import VALUE_LENGTH_MAX, clean_text, cleaned, is_plain
from infiniswap.device.api import ANSWER_BYTES_MAX
from infiniswap.device.control import client, listing
from infiniswap.device.spec.rundir import DevicePaths, running_names, stopped_names, take_lock
from infiniswap.errors import ConflictError, InfiniswapError, ProtocolMismatchError

BODIES = (m.Status, m.DrainInfo, m.VersionInfo, m.NonceInfo, m.HttpError)
FRAMES = (*m.TO_CONSUMER, *m.TO_DONOR)
TEXTS = st.text() | st.sampled_from([EVIL, "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ufeff"])


def texts(value: Any) -> Iterator[str]:
    """Every text in what was decoded."""
    match value:
        case str():
            yield value
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from texts(getattr(value, name))
        case dict():
            for key, item in value.items():
                yield from texts(key)
                yield from texts(item)
        case list() | tuple():
            for item in value:
                yield from texts(item)


def filled(kind: Any, text: str) -> Any:
    """A value of that type, as plain data, whose texts are that one wherever the type allows it."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.Metadata():
            return filled(info.type, text)
        case msgspec.inspect.StrType(pattern=str(pattern)) if "0-9a-f" in pattern:
            digits = "00000000-0000-0000-0000-000000000000" if "-[0" in pattern else "0" * 64
            return digits[:32] if "{32}" in pattern else digits
        case msgspec.inspect.StrType():
            return text[: info.max_length or len(text)]
        case msgspec.inspect.ListType():
            return [filled(info.item_type, text)]
        case msgspec.inspect.DictType():
            return {text: filled(info.value_type, text)}
        case msgspec.inspect.UnionType():
            return filled(info.types[0], text)
        case msgspec.inspect.StructType(cls=cls):
            fields = {field.name: filled(field.type, text) for field in info.fields}
            if info.array_like:
                return list(fields.values())
            tag = cls.__struct_config__.tag
            return fields if tag is None else {"type": tag, **fields}
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.FloatType():
            return 0.5
        case _:
            return 1


@pytest.mark.parametrize("kind", [*BODIES, *FRAMES])
@given(text=TEXTS, escaped=st.booleans())
def test_every_text_of_a_peer_is_clean_or_refused(kind: Any, text: str, escaped: bool) -> None:
    said = json.dumps(filled(kind, text), ensure_ascii=escaped).encode("utf-8", "replace")
    for decode in (m.decode_to_consumer, m.decode_to_donor, lambda body: m.decode_body(body, kind)):
        found: Any
        try:
            found = decode(said)
        except ProtocolMismatchError as error:
            found = str(error)
        for each in texts(found):
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


class Impostor:
    """What another user has put where a device's socket is expected; its answer may be changed."""

    def __init__(self, path: Path) -> None:
        self.answer = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    connection.sendall(b"HTTP/1.1 409 No\r\n\r\n" + self.answer)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[tuple[Impostor, DevicePaths]]:
    paths = DevicePaths("d1", tmp_path / "run" / "d1", tmp_path / "store")
    lock = take_lock(paths)
    made = Impostor(paths.socket)
    try:
        yield made, paths
    finally:
        made.close()
        os.close(lock)


def test_no_text_of_a_device_moves_the_terminal(impostor: tuple[Impostor, DevicePaths]) -> None:
    made, paths = impostor
    made.answer = json.dumps({"error": EVIL, "exit_code": 1}).encode()
    with pytest.raises(InfiniswapError) as caught:
        client.status(paths)
    assert str(caught.value).isprintable()
    (row,) = listing.local_devices(paths.run.parent, paths.store)
    assert str(row["state"]).isprintable()


def test_a_device_that_answers_without_end_does_not_answer(
    impostor: tuple[Impostor, DevicePaths],
) -> None:
    made, paths = impostor
    made.answer = b'{"error": "' + b"x" * ANSWER_BYTES_MAX + b'"}'
    with pytest.raises(ConflictError, match="an answer of more than"):
        client.status(paths)


def test_a_directory_with_another_name_is_no_device(tmp_path: Path) -> None:
    for name in ("d1", "\x1b[31m", "a b", "\u202eevil"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.device").touch()
    os.close(take_lock(DevicePaths("d1", tmp_path / "d1", tmp_path)))
    assert running_names(tmp_path) == []
    assert stopped_names(tmp_path, tmp_path) == ["d1"]
