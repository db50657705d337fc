# SPDX-License-Identifier: Apache-2.0
"""Proofs that both ends of a session know the cluster secret, which itself is never sent.

Mutual challenge and response with HMAC-SHA256, inside TLS. Each end contributes a nonce of 32
bytes, and each proof covers the TLS certificate of the donor, both nonces, who is talking and which
version was agreed on:

    proof = HMAC(session key, role ‖ certificate's digest ‖ version ‖ versions of both ‖ device
                 ‖ nonce_consumer ‖ nonce_donor)

- The consumer proves first. A donor says nothing that depends on the secret to a stranger, so
  nobody can guess at the secret from what a donor said.
- Each end takes the digest of the certificate that it sees. A host in between has to show one of
  its own, so the proofs that it forwards are refused at both ends (relay).
- The role differs between the ends, so a proof sent back to its maker proves nothing (reflection).
- Both nonces are fresh, so a recorded proof fits no other session (replay).
- The version lists are covered, so an attacker in between cannot make both ends use an older one.
- Fields are length-prefixed, so no two different transcripts give the same bytes.

After the handshake TLS protects the messages.

Pure: nonces are passed in.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

NONCE_BYTES: Final = 32

_DONOR: Final = b"infiniswap control donor"
_CONSUMER: Final = b"infiniswap control consumer"
_HTTP: Final = b"infiniswap control http"
_HTTP_DONOR: Final = b"infiniswap control http donor"

_HEX_DIGITS: Final = frozenset("0123456789abcdef")

HTTP_SCHEME: Final = "Infiniswap"
"""Name in the Authorization header."""
PROOF_HEADER: Final = "Infiniswap-Proof"
"""Header of an HTTP answer: the donor's proof."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What both ends know before the proofs.

    Attributes:
        digest: of the donor's certificate, as this end sees it.
        version: the one agreed on.
        versions_consumer: as offered in hello.
        versions_donor: as offered in challenge.
        device_id: of the consumer.
        nonce_consumer: hex, from hello.
        nonce_donor: hex, from challenge.
    """

    digest: bytes
    version: int
    versions_consumer: tuple[int, ...]
    versions_donor: tuple[int, ...]
    device_id: str
    nonce_consumer: str
    nonce_donor: str


def donor_proof(key: bytes, transcript: Transcript) -> str:
    """The donor's proof, hex."""
    return _session_proof(key, _DONOR, transcript)


def consumer_proof(key: bytes, transcript: Transcript) -> str:
    """The consumer's proof, hex."""
    return _session_proof(key, _CONSUMER, transcript)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What the proofs of one HTTP request cover.

    Attributes:
        digest: of the donor's certificate, as this end sees it.
        method, path: of the request.
        nonce: that the donor gave out, hex.
    """

    digest: bytes
    method: str
    path: str
    nonce: str


def http_proof(key: bytes, request: HttpRequest) -> str:
    """The client's proof, hex."""
    return _http_proof(key, _HTTP, request)


def http_donor_proof(key: bytes, request: HttpRequest) -> str:
    """The donor's proof, in the answer, hex."""
    return _http_proof(key, _HTTP_DONOR, request)


def proofs_equal(given: str, expected: str) -> bool:
    """Compares in constant time. `given` may be anything: of a header, what is no UTF-8 comes as
    lone surrogates."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())


def _session_proof(key: bytes, role: bytes, transcript: Transcript) -> str:
    fields = (
        str(transcript.version),
        ",".join(map(str, transcript.versions_consumer)),
        ",".join(map(str, transcript.versions_donor)),
        transcript.device_id,
        transcript.nonce_consumer,
        transcript.nonce_donor,
    )
    return _proof(key, role, transcript.digest, fields)


def _http_proof(key: bytes, role: bytes, request: HttpRequest) -> str:
    fields = (request.method.upper(), request.path, request.nonce)
    return _proof(key, role, request.digest, fields)


def _proof(key: bytes, role: bytes, digest: bytes, fields: Iterable[str]) -> str:
    if not key or not digest:
        raise ValueError("a proof needs a key and a certificate")
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (role, digest, *(field.encode() for field in fields)):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.hexdigest()


def http_authorization(key: bytes, request: HttpRequest) -> str:
    """Value of the Authorization header."""
    return f"{HTTP_SCHEME} {request.nonce}:{http_proof(key, request)}"


def parse_http_authorization(header: str) -> tuple[str, str] | None:
    """Nonce and proof of an Authorization header; None when it is not of this scheme."""
    scheme, _, rest = header.partition(" ")
    nonce, colon, proof = rest.strip().partition(":")
    if scheme != HTTP_SCHEME or not colon or not _is_hex256(nonce) or not _is_hex256(proof):
        return None
    return nonce, proof


def _is_hex256(text: str) -> bool:
    return len(text) == 64 and _HEX_DIGITS.issuperset(text)


class NonceStore:
    """Nonces given out for HTTP requests: each is good once, for a while, and few are kept.

    Args:
        count_max: beyond it the oldest is forgotten.
        life_s: how long one is good.
    """

    __slots__ = ("_count_max", "_given", "_life_s")

    def __init__(self, count_max: int = 1024, life_s: float = 30.0) -> None:
        self._count_max = count_max
        self._life_s = life_s
        self._given: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._given)

    def add(self, nonce: str, now_s: float) -> None:
        """Remembers a fresh nonce."""
        while len(self._given) >= self._count_max:
            del self._given[next(iter(self._given))]
        self._given[nonce] = now_s + self._life_s

    def take(self, nonce: str, now_s: float) -> bool:
        """Uses a nonce up; False when it was never given out, is used up or too old."""
        return self._given.pop(nonce, float("-inf")) >= now_s
