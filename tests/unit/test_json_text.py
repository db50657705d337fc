# SPDX-License-Identifier: Apache-2.0
"""Whatever claims to be JSON is read, or refused by one kind of error that quotes nothing of it."""

from __future__ import annotations

import contextlib
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from infiniswap.device.spec.spec import decode_spec
from infiniswap.device.succession.hand_over import read_kept
from infiniswap.errors import ConfigError
from infiniswap.json_text import NotJsonError, decode_json

PASSWORD = "hunter2"


class Inner(Struct, forbid_unknown_fields=True):
    kind: Literal["a", "b"]


class Outer(Struct):
    inner: Inner
    names: dict[str, int] = {}


@pytest.mark.parametrize(
    "data",
    [
        b"hunter2:x:0:0",
        b'"hunter2"',
        b'{"inner": "hunter2"}',
        b'{"inner": {"kind": "hunter2"}}',
        b'{"inner": {"kind": "a", "hunter2": 1}}',
        b'{"inner": {"kind": "a"}, "names": {"hunter2": "hunter2"}}',
        b'{"inner": {"kind": "hunter2\xff"}}',
        b'{"names": {"hunter2\xff": 1}}',
        b'{"x": ' + b"[" * 100_000,
        b'"\\ud800hunter2"',
        b"",
    ],
)
def test_an_error_quotes_nothing_of_what_was_read(data: bytes) -> None:
    with pytest.raises(NotJsonError) as caught:
        decode_json(data, Outer)
    assert str(caught.value)
    assert PASSWORD not in str(caught.value)
    for read in (lambda: decode_spec(data, "there"), lambda: read_kept(data)):
        with pytest.raises(ConfigError) as refused:
            read()
        assert PASSWORD not in str(refused.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_one_kind_of_error(data: bytes) -> None:
    for kind in (Outer, str, dict[str, str], list[object]):
        with contextlib.suppress(NotJsonError):
            decode_json(data, kind)


def test_what_is_right_is_read() -> None:
    assert decode_json(b'{"inner": {"kind": "a"}, "new": 1}', Outer) == Outer(Inner("a"))
