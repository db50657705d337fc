# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.auth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.control import auth

SECRET = b"correct horse battery staple"
TRANSCRIPT = auth.Transcript(
    version=1,
    versions_consumer=(1,),
    versions_donor=(1,),
    device_id="00000000-0000-0000-0000-000000000001",
    nonce_consumer="11" * 32,
    nonce_donor="22" * 32,
)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"versions_consumer": (1, 2)},
        {"versions_donor": (0, 1)},
        {"device_id": "00000000-0000-0000-0000-000000000002"},
        {"nonce_consumer": "12" * 32},
        {"nonce_donor": "23" * 32},
        # As when a proof is sent back to its maker.
        {"nonce_consumer": "22" * 32, "nonce_donor": "11" * 32},
    ],
)
def test_every_part_of_the_transcript_counts_and_so_does_who_proves(change: dict[str, Any]) -> None:
    other = replace(TRANSCRIPT, **change)
    for transcript in (TRANSCRIPT, other):
        assert auth.donor_proof(SECRET, transcript) != auth.consumer_proof(SECRET, TRANSCRIPT)
    for proof in (auth.donor_proof, auth.consumer_proof):
        assert proof(SECRET, other) != proof(SECRET, TRANSCRIPT)
        assert proof(b"another secret of 16+", TRANSCRIPT) != proof(SECRET, TRANSCRIPT)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_requests_share_a_proof(a: tuple[str, str], b: tuple[str, str]) -> None:
    proofs = auth.http_proof(SECRET, "GET", *a), auth.http_proof(SECRET, "GET", *b)
    assert auth.proofs_equal(*proofs) == (a == b)


def test_an_empty_secret_is_never_used() -> None:
    with pytest.raises(ValueError, match="secret"):
        auth.donor_proof(b"", TRANSCRIPT)


@given(st.binary(max_size=80))
def test_what_is_no_utf8_is_a_wrong_proof(given_bytes: bytes) -> None:
    given = given_bytes.decode(errors="surrogateescape")  # as a header comes
    expected = auth.http_proof(SECRET, "GET", "/", "0" * 64)
    assert not auth.proofs_equal(given, expected)
    assert not auth.proofs_equal("\ud800" + expected, expected)
    assert auth.proofs_equal(expected, expected)


@given(st.text(max_size=200))
def test_any_authorization_header_is_parsed_or_refused(header: str) -> None:
    parsed = auth.parse_http_authorization(header)
    assert parsed is None or len(parsed[0]) == len(parsed[1]) == 64


@pytest.mark.parametrize("digit", ["\udc9d", "é", "F", "g", " "])
def test_proofs_and_nonces_are_hexadecimal(digit: str) -> None:
    # Headers come with bytes that are no UTF-8 as lone surrogates.
    for nonce, proof in (("0" * 64, digit + "0" * 63), ("0" * 63 + digit, "0" * 64)):
        assert auth.parse_http_authorization(f"Infiniswap {nonce}:{proof}") is None


def test_a_nonce_is_good_once_and_not_for_ever() -> None:
    store = auth.NonceStore(life_s=30.0)
    store.add("a", 0.0)
    store.add("b", 0.0)
    assert store.take("a", 1.0)
    assert not store.take("a", 1.0)
    assert not store.take("b", 31.0)
    assert not store.take("never", 0.0)


def test_the_store_of_nonces_is_bounded_and_drops_the_oldest() -> None:
    store = auth.NonceStore(count_max=3)
    for number in range(10):
        store.add(str(number), 0.0)
    assert len(store) == 3
    assert not store.take("6", 0.0)
    assert store.take("9", 0.0)
