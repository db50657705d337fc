# SPDX-License-Identifier: Apache-2.0
"""CRC-32C, and other bytes that have the same one: what somebody does who alters pages."""

from __future__ import annotations

from typing import Final

_POLYNOMIAL = 0x82F63B78


def _made_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ _POLYNOMIAL * (byte & 1)
        table.append(byte)
    return tuple(table)


_TABLE: Final = _made_table()
_INDEX_BY_TOP: Final = {entry >> 24: index for index, entry in enumerate(_TABLE)}


def crc32c(data: bytes, register: int = 0xFFFFFFFF) -> int:
    """The register after these bytes; the checksum is that turned over."""
    for byte in data:
        register = register >> 8 ^ _TABLE[(register ^ byte) & 0xFF]
    return register


def with_crc_of(page: bytes, right: bytes) -> bytes:
    """`page` with its last four bytes chosen so that it has the CRC-32C of `right`."""
    begun, wanted = crc32c(page[:-4]), crc32c(right)
    for _ in range(4):  # back from the end: each table entry is known by its highest byte
        index = _INDEX_BY_TOP[wanted >> 24]
        wanted = (wanted ^ _TABLE[index]) << 8 | index
    return page[:-4] + (wanted ^ begun).to_bytes(4, "little")
