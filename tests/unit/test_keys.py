# SPDX-License-Identifier: Apache-2.0
"""infiniswap.keys."""

from __future__ import annotations

import base64
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.keys import Keys, derive, hkdf, parse

# RFC 5869, appendix A: secret, salt, info, length, result.
VECTORS = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        42,
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        82,
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c6"
        "5e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        42,
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


@pytest.mark.parametrize(("secret", "salt", "info", "length", "result"), VECTORS)
def test_hkdf_is_that_of_rfc_5869(
    secret: str, salt: str, info: str, length: int, result: str
) -> None:
    made = hkdf(bytes.fromhex(secret), bytes.fromhex(info), bytes.fromhex(salt), length)
    assert made.hex() == result


def test_each_purpose_has_a_key_of_its_own() -> None:
    secret = secrets.token_bytes(32)
    keys = derive(secret)
    assert len({secret, keys.session, keys.operator, keys.announcement}) == 4
    assert derive(secret) == keys != derive(secrets.token_bytes(32))
    assert secret.hex() not in repr(keys)
    assert keys.session.hex() not in repr(keys)
    assert repr(keys.session) not in repr(keys)


@given(st.binary(min_size=32, max_size=32))
def test_what_a_generator_makes_is_read_in_hex_and_base64(secret: bytes) -> None:
    is_random = len(set(secret)) >= 16
    for text in (secret.hex().encode(), base64.b64encode(secret)):
        if is_random:
            assert parse(text) == derive(secret)
        else:
            with pytest.raises(ValueError, match="few of its bytes differ"):
                parse(text)


def test_a_session_key_alone_has_no_other_key() -> None:
    keys = derive(secrets.token_bytes(32))
    assert parse(keys.session_key_text().encode()) == Keys(keys.session)


@given(st.binary(max_size=100).filter(lambda text: len(text) not in (44, 64)))
def test_anything_else_is_refused_and_not_quoted(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"cluster secret|session key") as caught:
        parse(text)
    assert len(text) < 8 or text.decode(errors="replace") not in str(caught.value)
