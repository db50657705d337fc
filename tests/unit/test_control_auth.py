# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.auth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.control import auth

KEY = b"a key of 32 bytes, of any kind.."
TRANSCRIPT = auth.Transcript(
    digest=b"3" * 32,
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
        # As when another host ends TLS in between.
        {"digest": b"4" * 32},
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
        assert auth.donor_proof(KEY, transcript) != auth.consumer_proof(KEY, TRANSCRIPT)
    for proof in (auth.donor_proof, auth.consumer_proof):
        assert proof(KEY, other) != proof(KEY, TRANSCRIPT)
        assert proof(b"another secret of 16+", TRANSCRIPT) != proof(KEY, TRANSCRIPT)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_requests_share_a_proof(a: tuple[str, str], b: tuple[str, str]) -> None:
    requests = [auth.HttpRequest(b"3" * 32, "GET", *each) for each in (a, b)]
    proofs = [auth.http_proof(KEY, request) for request in requests]
    assert auth.proofs_equal(*proofs) == (a == b)
    assert not auth.proofs_equal(auth.http_donor_proof(KEY, requests[0]), proofs[0])
    elsewhere = replace(requests[0], digest=b"4" * 32)
    assert not auth.proofs_equal(auth.http_proof(KEY, elsewhere), proofs[0])


def test_no_proof_without_a_key_or_a_certificate() -> None:
    with pytest.raises(ValueError, match="a key and a certificate"):
        auth.donor_proof(b"", TRANSCRIPT)
    with pytest.raises(ValueError, match="a key and a certificate"):
        auth.donor_proof(KEY, replace(TRANSCRIPT, digest=b""))


@given(st.binary(max_size=80))
def test_what_is_no_utf8_is_a_wrong_proof(given_bytes: bytes) -> None:
    given = given_bytes.decode(errors="surrogateescape")  # as a header comes
    expected = auth.http_proof(KEY, auth.HttpRequest(b"3" * 32, "GET", "/", "0" * 64))
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
    nonces = auth.Nonces(b"key", life_s=30.0)
    first, second = (nonces.make(random * 8, 0.0) for random in (b"1", b"2"))
    assert auth.parse_http_authorization(f"Infiniswap {first}:{'0' * 64}")
    assert nonces.is_good(first, 1.0)
    nonces.use(first)
    assert not nonces.is_good(first, 1.0)
    assert nonces.is_good(second, 30.0)
    assert not nonces.is_good(second, 30.1)


def test_a_nonce_that_was_never_given_out_is_not_good() -> None:
    nonces = auth.Nonces(b"key")
    nonce = nonces.make(bytes(8), 0.0)
    assert not auth.Nonces(b"another key").is_good(nonce, 0.0)
    for at in range(len(nonce)):
        digit = "0" if nonce[at] != "0" else "1"
        assert not nonces.is_good(nonce[:at] + digit + nonce[at + 1 :], 0.0)


def test_few_used_nonces_are_kept() -> None:
    nonces = auth.Nonces(b"key", used_max=3)
    made = [nonces.make(bytes([number]) * 8, 0.0) for number in range(10)]
    for nonce in made:
        nonces.use(nonce)
    assert [nonces.is_good(nonce, 0.0) for nonce in made] == [True] * 7 + [False] * 3
