# SPDX-License-Identifier: Apache-2.0
"""The cluster secret and the keys that come from it. Pure: no I/O.

The secret has 256 random bits. HKDF-SHA256 (RFC 5869) derives a key for each purpose, so that a
host can be given one without the others. Of the session key nobody can compute the secret.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SECRET_BYTES: Final = 32
_DISTINCT_MIN: Final = 16
"""Different values among 32 bytes. Random ones have fewer with a probability below 2^-60; a text
that somebody typed in hex digits usually has."""
_SESSION_KEY: Final = b"session-key:"
_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """What a host of a cluster knows.

    Attributes:
        session: proves that an end belongs to the cluster; for sessions, status and metrics.
        operator: for drain and undrain; None: this host may not.
        announcement: for announcements on a broker; None: this host cannot check them.
    """

    session: bytes = field(repr=False)
    operator: bytes | None = field(default=None, repr=False)
    announcement: bytes | None = field(default=None, repr=False)

    def session_key_text(self) -> str:
        """The session key as a file holds it, without the line's end."""
        return f"{_SESSION_KEY.decode()}{self.session.hex()}"


def derive(secret: bytes) -> Keys:
    """The keys of a cluster secret."""
    return Keys(
        hkdf(secret, b"infiniswap v2 session"),
        hkdf(secret, b"infiniswap v2 operator"),
        hkdf(secret, b"infiniswap v2 announcement"),
    )


def announcement_keys(accepted: Iterable[Keys]) -> tuple[bytes, ...]:
    """With which announcements are checked, the first one for our own; empty: they cannot be,
    as the first secret of this host is a session key alone."""
    found = [keys.announcement for keys in accepted]
    if not found or found[0] is None:
        return ()
    return tuple(key for key in found if key is not None)


def hkdf(secret: bytes, info: bytes, salt: bytes = b"", length: int = _HASH_BYTES) -> bytes:
    """HKDF-SHA256, RFC 5869. (A process that is locked in memory loads no library for it.)"""
    import hmac  # here: every command imports this module, and OpenSSL takes a while to load

    key = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    made = block = b""
    for number in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes((number,)), "sha256")
        made += block
    return made[:length]


def parse(text: bytes) -> Keys:
    """Reads the contents of a secret's file: the secret in 64 hex digits or in base64, or a session
    key alone.

    Raises:
        ValueError: it is neither, or no random number; says why.
    """
    if text.startswith(_SESSION_KEY):
        key = _decoded(text.removeprefix(_SESSION_KEY))
        if key is None:
            raise ValueError("the session key is not 64 hex digits")
        return Keys(key)
    secret = _decoded(text)
    if secret is None:
        raise ValueError("the cluster secret is not 256 random bits: somebody may have typed it")
    if len(set(secret)) < _DISTINCT_MIN:
        raise ValueError("the cluster secret is not random: few of its bytes differ")
    return derive(secret)


def _decoded(text: bytes) -> bytes | None:
    """32 bytes; None: this is something else."""
    try:
        if len(text) == 2 * SECRET_BYTES:
            return binascii.unhexlify(text)
        found = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        return None
    return found if len(found) == SECRET_BYTES else None
