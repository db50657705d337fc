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


class Nonces:
    """Nonces for HTTP requests. Each is good once and for a while. None is kept that was only given
    out, so whoever asks for many takes nobody's away: its own time and a MAC stand in each.

        nonce = end in ms (8 bytes) ‖ random (8) ‖ first half of HMAC-SHA256(key, all before)

    Args:
        key: of this server alone, random.
        life_s: how long one is good.
        used_max: of those used up and not out of date; beyond it the oldest is forgotten. Only who
            has proved the secret uses one up.
    """

    __slots__ = ("_key", "_life_s", "_used", "_used_max")

    def __init__(self, key: bytes, life_s: float = 30.0, used_max: int = 4096) -> None:
        self._key = key
        self._life_s = life_s
        self._used_max = used_max
        self._used: dict[str, None] = {}

    def make(self, random: bytes, now_s: float) -> str:
        """A fresh nonce, hex, with 8 random bytes."""
        body = round((now_s + self._life_s) * 1000).to_bytes(8, "big") + random
        return (body + self._mac(body)).hex()

    def is_good(self, nonce: str, now_s: float) -> bool:
        """Whether it was given out (64 hex digits), is not used up and not too old."""
        raw = bytes.fromhex(nonce)
        body, mac = raw[:16], raw[16:]
        is_ours = hmac.compare_digest(mac, self._mac(body))
        is_fresh = int.from_bytes(body[:8], "big") >= now_s * 1000
        return is_ours and is_fresh and nonce not in self._used

    def use(self, nonce: str) -> None:
        """It is used up: its proof was right."""
        while len(self._used) >= self._used_max:
            del self._used[next(iter(self._used))]
        self._used[nonce] = None

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:16]
