# SPDX-License-Identifier: Apache-2.0
"""The token: what goes in comes out, and no slip of the hand passes for another token."""

from __future__ import annotations

import base64
import binascii

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.errors import UsageError
from infiniswap.invitation.token import ADDRESSES_MAX, Token, decode, encode
from infiniswap.units import HostPort

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True),
)


@st.composite
def tokens(draw: st.DrawFn) -> Token:
    port = draw(st.integers(1, 65_535))
    hosts = draw(st.lists(HOSTS, min_size=1, max_size=ADDRESSES_MAX))
    return Token(
        tuple(HostPort(host, port) for host in hosts),
        draw(st.binary(min_size=32, max_size=32)),
        draw(st.binary(min_size=16, max_size=16)),
    )


@given(tokens())
def test_a_token_comes_out_as_it_went_in(token: Token) -> None:
    text = encode(token)
    assert set(text) <= set(ALPHABET)
    assert decode(text) == token
    # As somebody types it, or a mail wraps it.
    assert decode(f"  {text[:20].upper()}\n  {text[20:40]} - {text[40:]}\n") == token


@given(tokens(), st.data())
def test_no_slip_of_the_hand_makes_a_token(token: Token, data: st.DataObject) -> None:
    text = encode(token)
    at = data.draw(st.integers(0, len(text) - 1))
    wrong = data.draw(st.sampled_from(ALPHABET))
    slips = [
        text[:at] + wrong + text[at + 1 :],
        text[:at] + text[at + 1 :],
        text[:at] + wrong + text[at:],
        text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
        text[:at],
    ]
    for slip in slips:
        if slip != text:
            with pytest.raises(UsageError, match=r"token"):
                decode(slip)


@given(st.text(max_size=200))
def test_any_other_text_is_told_to_be_none(text: str) -> None:
    with pytest.raises(UsageError, match="token"):
        decode(text)


def packed(body: bytes) -> str:
    """Bytes with a right checksum."""
    whole = body + binascii.crc32(body).to_bytes(4, "big")
    return base64.b32encode(whole).decode().rstrip("=").lower()


def test_a_token_of_a_later_release_is_told() -> None:
    with pytest.raises(UsageError, match="version 2, and this release reads version 1"):
        decode(packed(bytes([2]) + bytes(60)))


@pytest.mark.parametrize(
    "addresses",
    ["", "04010203", "07", "0004c3a9c3a9", "00ff61", "0003612f62", "04" + "01020304" * 5],
)
def test_addresses_that_are_none_are_refused(addresses: str) -> None:
    head = bytes([1]) + (9403).to_bytes(2, "big") + bytes(48)
    with pytest.raises(UsageError, match="this is no token"):
        decode(packed(head + bytes.fromhex(addresses)))


def test_the_password_is_not_shown() -> None:
    token = Token((HostPort("10.0.0.2", 9403),), bytes(32), b"very-secret-word")
    assert "very" not in repr(token)
