# SPDX-License-Identifier: Apache-2.0
"""Keys that seal pages, without the C library; and that of a real device."""

from __future__ import annotations

import errno
import hashlib
import hmac
import mmap
import os

from infiniswap.errors import EngineError, UnavailableError
from infiniswap.secret import forget_key, read_host_key
from infiniswap.units import PAGE_BYTES
from support.devices.cluster import Device

KEY_BYTES = 32
SEALED_BYTES = 60


class MemoryKeys:
    """infiniswap.engine.seal.SealKeys.

    Attributes:
        has_library: otherwise nothing can seal pages.
        host_keys: every bytearray with a host's key that was passed in.
        values: every key that was made or loaded.
    """

    def __init__(self) -> None:
        self.has_library = True
        self.host_keys: list[bytearray] = []
        self.values: list[bytes] = []

    def library(self) -> str:
        if not self.has_library:
            raise UnavailableError("there is no library", mend="Install one.")
        return "a library"

    def _descriptor(self, key: bytes) -> int:
        fd = os.memfd_create("key", os.MFD_CLOEXEC)
        os.write(fd, key)
        self.values.append(key)
        return fd

    def make(self) -> int:
        return self._descriptor(os.urandom(KEY_BYTES))

    def _mask(self, host_key: bytearray) -> bytes:
        assert len(host_key) == KEY_BYTES
        assert any(host_key)
        self.host_keys.append(host_key)
        return hashlib.sha256(host_key).digest()

    def save(self, fd: int, host_key: bytearray) -> bytes:
        key, mask = os.pread(fd, KEY_BYTES, 0), self._mask(host_key)
        tag = hmac.digest(mask, key, "sha256")[: SEALED_BYTES - KEY_BYTES]
        return bytes(a ^ b for a, b in zip(key, mask, strict=True)) + tag

    def load(self, sealed: bytes, host_key: bytearray) -> int:
        mask = self._mask(host_key)
        key = bytes(a ^ b for a, b in zip(sealed, mask, strict=False))
        tag = hmac.digest(mask, key, "sha256")[: SEALED_BYTES - KEY_BYTES]
        if len(sealed) != SEALED_BYTES or tag != sealed[KEY_BYTES:]:
            raise EngineError("altered", code=errno.EKEYREJECTED)
        return self._descriptor(key)

    def forget(self, fd: int) -> None:
        os.pwrite(fd, bytes(KEY_BYTES), 0)


_MAGIC_BYTES = 16
"""Before the key, in its memory: csrc/seal/key.c."""


def key_in_clear(device: Device) -> bytes:
    """Of a device that keeps its contents: this host's root can have it, by the host's key."""
    from infiniswap.engine.native_seal import NativeSealKeys

    host_key = read_host_key(device.backup.with_name("host-key"))
    fd = NativeSealKeys().load(device.backup.with_suffix(".key").read_bytes(), host_key)
    forget_key(host_key)
    with mmap.mmap(fd, PAGE_BYTES) as memory:
        os.close(fd)
        return memory[_MAGIC_BYTES : _MAGIC_BYTES + KEY_BYTES]
