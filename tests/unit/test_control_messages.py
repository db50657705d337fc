# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.messages."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import values

from infiniswap.control import messages as m
from infiniswap.errors import ProtocolMismatchError
from infiniswap.fields import SLOTS_MAX


@pytest.mark.parametrize("kind", [*m.TO_DONOR, *m.TO_CONSUMER])
@settings(max_examples=20)
@given(data=st.data())
def test_what_an_end_says_round_trips(kind: Any, data: st.DataObject) -> None:
    said = msgspec.convert(data.draw(values(kind)), kind)
    decode = m.decode_to_donor if kind in m.TO_DONOR else m.decode_to_consumer
    assert decode(m.encode(said)) == said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
FIELDS = ["id", "lease", "slot", "slots", "slab", "epoch", "proof", "nonce", "versions", "reason"]
TAGS = [kind.__struct_config__.tag for kind in m.TO_DONOR]
TYPED = st.fixed_dictionaries({"type": st.sampled_from(TAGS)}, optional=dict.fromkeys(FIELDS, JSON))


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
        b'{"type":"lease","id":1,"slots_max":-1}',
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
    device_id = "00000000-0000-0000-0000-000000000000"
    good = m.Hello([1], device_id, "swap0", "höst", "0" * 64)
    assert m.decode_to_donor(m.encode(good)) == good
    for bad in ("a\nERROR b", "\x1b[31m", "", "x" * 129):
        with pytest.raises(ProtocolMismatchError):
            m.decode_to_donor(m.encode(msgspec.structs.replace(good, device_name=bad)))


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert m.decode_to_donor(b'{"type":"ping","id":7,"colour":"red"}') == m.Ping(id=7)


def test_the_longest_message_fits() -> None:
    top = (1 << 53) - 1
    slots = [m.SlotInfo(SLOTS_MAX - 1, top, (1 << 31) - 1)] * SLOTS_MAX
    answer = m.RenewAnswer(id=top, epoch=top, slots=slots)
    assert len(m.encode(answer)) < m.MESSAGE_BYTES_MAX
    activity = [m.SlotActivity(SLOTS_MAX - 1, 123456789.123456789)] * SLOTS_MAX
    assert len(m.encode(m.ActivityAnswer(id=top, slots=activity))) < m.MESSAGE_BYTES_MAX


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_both_ends_choose_the_same_version(ours: list[int], theirs: list[int]) -> None:
    chosen = m.choose_version(ours, theirs)
    assert chosen == m.choose_version(theirs, ours)
    common = set(ours) & set(theirs)
    assert chosen == (max(common) if common else None)


@pytest.mark.parametrize("forged", ["\n", "\x1b[2J", "\x9b", "\u2028", "\u202e"])
def test_an_unknown_type_cannot_forge_log_lines(forged: str) -> None:
    said = json.dumps({"type": f"x{forged}ERROR all is lost"})
    for decode in (m.decode_to_donor, m.decode_to_consumer):
        with pytest.raises(ProtocolMismatchError) as caught:
            decode(said)
        assert forged not in caught.value.what
