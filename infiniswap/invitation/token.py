# SPDX-License-Identifier: Apache-2.0
"""The token that `infiniswap invite` prints and `infiniswap join` takes. Pure.

    version 1 | port 2 | password 16 | digest 32 | addresses | CRC-32 of all this 4

An address is a byte and its bytes: 4 and an IPv4 address, 6 and an IPv6 address, 0 and a name of
one byte's length. The text is base32 (RFC 4648) in lower case: one word for a mouse, and nothing
that a shell changes. The CRC finds every single character that was mistyped and every two that
changed places, so a refusal is never for a slip of the hand.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import struct
from dataclasses import dataclass, field
from typing import Final

from infiniswap.errors import UsageError
from infiniswap.units import HostPort, parse_host_port

VERSION: Final = 1
DIGEST_BYTES: Final = 32
PASSWORD_BYTES: Final = 16
"""128 random bits: nobody guesses them in ten minutes, nor in a lifetime."""
ADDRESSES_MAX: Final = 4
"""More make the token longer than a line of a terminal can be."""

_HEAD: Final = struct.Struct(f">BH{PASSWORD_BYTES}s{DIGEST_BYTES}s")
_CRC: Final = struct.Struct(">I")
_NAME_KIND: Final = 0
_ADDRESS_BYTES: Final = {4: 4, 6: 16}
_TEXT_MAX: Final = 4096
_LAYOUT: Final = re.compile(r"[\s-]+")
"""A token may have been wrapped, or grouped by hand."""
_MEND: Final = "Copy the whole command that `infiniswap invite` printed on the other host."


@dataclass(frozen=True, slots=True)
class Token:
    """What the joining host has to know.

    Attributes:
        addresses: of the inviting host, the likeliest first; they share one port.
        digest: SHA-256 of the certificate that it shows.
        password: good once.
    """

    addresses: tuple[HostPort, ...]
    digest: bytes
    password: bytes = field(repr=False)


def encode(token: Token) -> str:
    """The token as text.

    Raises:
        ValueError: it has no address, too many, or several ports.
    """
    ports = {address.port for address in token.addresses}
    if len(ports) != 1 or len(token.addresses) > ADDRESSES_MAX:
        raise ValueError("a token has one to four addresses with one port")
    body = _HEAD.pack(VERSION, *ports, token.password, token.digest)
    body += b"".join(_packed(address.host) for address in token.addresses)
    body += _CRC.pack(binascii.crc32(body))
    return base64.b32encode(body).decode().rstrip("=").lower()


def _packed(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        return bytes((_NAME_KIND, len(name))) + name
    return bytes((address.version,)) + address.packed


def decode(text: str) -> Token:
    """The token of a text.

    Raises:
        UsageError: characters are missing or wrong, or another release made it.
    """
    body = _checked(text)
    if body[0] != VERSION:
        raise UsageError(
            f"the token has version {body[0]}, and this release reads version {VERSION}",
            where="TOKEN",
            mend="Install the same release of Infiniswap on both hosts.",
        )
    try:
        _, port, password, digest = _HEAD.unpack_from(body)
        addresses = _addresses(body[_HEAD.size : -_CRC.size], port)
    except (struct.error, ValueError, IndexError, UsageError):
        raise _damaged() from None
    return Token(addresses, digest, password)


def _checked(text: str) -> bytes:
    """The bytes of a text whose CRC is right."""
    if not text.strip():
        raise UsageError("the token is empty", where="TOKEN", mend=_MEND)
    written = _LAYOUT.sub("", text[:_TEXT_MAX]).upper()
    try:
        body = base64.b32decode(written + "=" * (-len(written) % 8))
    except (binascii.Error, ValueError):
        raise _damaged() from None
    # The last character may have bits that stand for nothing.
    if len(body) <= _CRC.size or base64.b32encode(body).decode().rstrip("=") != written:
        raise _damaged()
    if _CRC.unpack(body[-_CRC.size :])[0] != binascii.crc32(body[: -_CRC.size]):
        raise _damaged()
    return body


def _damaged() -> UsageError:
    return UsageError(
        "this is no token: characters are missing or wrong",
        where="TOKEN",
        mend=f"{_MEND} Nothing was sent.",
    )


def _addresses(packed: bytes, port: int) -> tuple[HostPort, ...]:
    """Raises ValueError, IndexError or UsageError: they are none."""
    found: list[HostPort] = []
    while packed:
        kind, packed = packed[0], packed[1:]
        if kind == _NAME_KIND:
            count, packed = packed[0], packed[1:]
            host = parse_host_port(packed[:count].decode("ascii"), port).host
        else:
            count = _ADDRESS_BYTES.get(kind, 0)
            host = str(ipaddress.ip_address(packed[:count]))
        if len(packed) < count or not count:
            raise ValueError("it is cut short")
        packed = packed[count:]
        found.append(HostPort(host, port))
    if not 0 < len(found) <= ADDRESSES_MAX or not port:
        raise ValueError("no address")
    return tuple(found)
