# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.messages and openapi."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infiniswap.control import messages as m
from infiniswap.control.openapi import document
from infiniswap.control.text import clean_text
from infiniswap.errors import ProtocolMismatchError
from infiniswap.fields import SLOTS_MAX


def from_info(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.Metadata():
            return from_info(info.type)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            high = info.le if info.le is not None else (info.lt - 1 if info.lt else None)
            return st.integers(info.ge, high)
        case msgspec.inspect.FloatType():
            return st.floats(info.ge, info.le, allow_nan=False, allow_infinity=False)
        case msgspec.inspect.StrType():
            if info.pattern:
                found = st.from_regex(info.pattern.replace(r"\Z", "$"), fullmatch=True)
                longest = info.max_length or 1 << 20
                # What cannot be printed arrives as something else, which other tests hold.
                return found.map(lambda s: clean_text(s.rstrip("\n"), longest)).filter(
                    lambda s: bool(s) or "?" in info.pattern
                )
            return st.text(
                st.characters(codec="utf-8", exclude_categories=("C", "Z")),
                min_size=info.min_length or 0,
                max_size=info.max_length,
            )
        case msgspec.inspect.ListType():
            return st.lists(from_info(info.item_type), min_size=info.min_length or 0, max_size=8)
        case msgspec.inspect.StructType():
            return message(info.cls)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(from_info, info.types))
        case msgspec.inspect.NoneType():
            return st.none()
        case _:
            raise NotImplementedError(info)


def message(kind: Any) -> st.SearchStrategy[Any]:
    fields = {field.name: from_info(field.type) for field in msgspec.inspect.type_info(kind).fields}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


@pytest.mark.parametrize("kind", m.TO_DONOR)
@settings(max_examples=20)
@given(data=st.data())
def test_what_a_consumer_says_round_trips(kind: Any, data: st.DataObject) -> None:
    said = data.draw(message(kind))
    assert m.decode_to_donor(m.encode(said)) == said


@pytest.mark.parametrize("kind", m.TO_CONSUMER)
@settings(max_examples=20)
@given(data=st.data())
def test_what_a_donor_says_round_trips(kind: Any, data: st.DataObject) -> None:
    said = data.draw(message(kind))
    assert m.decode_to_consumer(m.encode(said)) == said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TYPED = st.dictionaries(
    st.sampled_from(
        ["id", "lease", "slot", "slots", "slab", "epoch", "proof", "nonce", "versions", "reason"]
    ),
    JSON,
).flatmap(
    lambda body: st.sampled_from([kind.__struct_config__.tag for kind in m.TO_DONOR]).map(
        lambda tag: {**body, "type": tag}
    )
)


@given(st.binary() | st.text() | (JSON | TYPED).map(json.dumps))
def test_garbage_is_one_kind_of_error(frame: bytes | str) -> None:
    for decode in (m.decode_to_donor, m.decode_to_consumer):
        with contextlib.suppress(ProtocolMismatchError):
            decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"type":"ping","id":1,"x":' + b'{"y":' * 100_000,
        b'{"type":"ping","id":-1}',
        b'{"type":"ping","id":9007199254740992}',
        b'{"type":"ping","id":1.5}',
        b'{"type":"ping","id":true}',
        b'{"type":"pong"}',
        b'{"type":"nonsense","id":1}',
        b'{"type":"lease","id":1,"slots_max":0}',
        b'{"type":"lease","id":1,"slots_max":16385}',
        b'{"type":"auth","proof":"zz"}',
        b'{"type":"auth","proof":"' + b"a" * 64 + b'\\n"}',
        b"\xff\xfe",
        "\ud800",
    ],
)
def test_what_is_out_of_bounds_is_refused(frame: bytes | str) -> None:
    with pytest.raises(ProtocolMismatchError):
        m.decode_to_donor(frame)


def test_names_cannot_forge_log_lines() -> None:
    good = m.Hello(
        versions=[1],
        device_id="0" * 8 + "-0000-0000-0000-" + "0" * 12,
        device_name="swap0",
        host_name="höst",
        nonce="0" * 64,
    )
    assert m.decode_to_donor(m.encode(good)) == good
    for bad in ("a\nERROR b", "\x1b[31m", "", "x" * 129):
        with pytest.raises(ProtocolMismatchError):
            m.decode_to_donor(m.encode(msgspec.structs.replace(good, device_name=bad)))


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert m.decode_to_donor(b'{"type":"ping","id":7,"colour":"red"}') == m.Ping(id=7)


def test_the_longest_message_fits() -> None:
    top = (1 << 53) - 1
    slots = [m.SlotInfo(SLOTS_MAX - 1, top, (1 << 31) - 1)] * SLOTS_MAX
    answer = m.RenewAnswer(id=top, token="f" * 32, epoch=top, slots=slots)
    assert len(m.encode(answer)) < m.MESSAGE_BYTES_MAX
    activity = [m.SlotActivity(SLOTS_MAX - 1, 123456789.123456789)] * SLOTS_MAX
    assert len(m.encode(m.ActivityAnswer(id=top, slots=activity))) < m.MESSAGE_BYTES_MAX


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_both_ends_choose_the_same_version(ours: list[int], theirs: list[int]) -> None:
    chosen = m.choose_version(ours, theirs)
    assert chosen == m.choose_version(theirs, ours)
    common = set(ours) & set(theirs)
    assert chosen == (max(common) if common else None)


def test_the_openapi_document_names_every_message() -> None:
    made = document("1.2.3")
    assert set(made["paths"]) >= {m.STATUS_PATH, m.VERSION_PATH, m.SESSION_PATH}
    for kind in (*m.TO_DONOR, *m.TO_CONSUMER, m.Status):
        assert kind.__name__ in made["components"]["schemas"]


@pytest.mark.parametrize("forged", ["\n", "\x1b[2J", "\x9b", "\u2028", "\u202e"])
def test_an_unknown_type_cannot_forge_log_lines(forged: str) -> None:
    said = json.dumps({"type": f"x{forged}ERROR all is lost"})
    for decode in (m.decode_to_donor, m.decode_to_consumer):
        with pytest.raises(ProtocolMismatchError) as caught:
            decode(said)
        assert forged not in caught.value.what
