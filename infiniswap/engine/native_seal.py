# SPDX-License-Identifier: Apache-2.0
"""isw_seal_*: keys that seal a device's pages; threads: any, see `infiniswap.engine.native`."""

from __future__ import annotations

import errno

from infiniswap.engine.binding import check, ffi, lib, text_of
from infiniswap.errors import EngineError, UnavailableError


class NativeSealKeys:
    """infiniswap.engine.seal.SealKeys on isw_seal_*."""

    def library(self) -> str:
        """Blocking. UnavailableError: this build or this host has none."""
        error = ffi.new("struct isw_error *")
        name = ffi.new("char **")
        result = lib.isw_seal_check(name, error)
        if result == -errno.ENOTSUP:
            raise UnavailableError(
                f"pages cannot be sealed on this host: {text_of(error, errno.ENOTSUP)}",
                mend="Or write seal = false under [device]: then pages are not sealed.",
            )
        check(result, "pages cannot be sealed", error)
        text: bytes = ffi.string(name[0])
        return text.decode()

    def make(self) -> int:
        """The caller closes the descriptor."""
        error = ffi.new("struct isw_error *")
        fd = ffi.new("int32_t *")
        check(lib.isw_seal_key_make(fd, error), "cannot make the device's key", error)
        return int(fd[0])

    def save(self, fd: int, host_key: bytearray) -> bytes:
        """EngineError EBADF: it is not the descriptor of a key."""
        error = ffi.new("struct isw_error *")
        sealed = ffi.new("uint8_t[]", lib.ISW_SEALED_KEY_BYTES)
        result = lib.isw_seal_key_save(fd, _pointer(host_key), sealed, error)
        check(result, "cannot seal the device's key", error)
        return bytes(ffi.buffer(sealed))

    def load(self, sealed: bytes, host_key: bytearray) -> int:
        """The caller closes the descriptor. EngineError EKEYREJECTED."""
        if len(sealed) != lib.ISW_SEALED_KEY_BYTES:
            raise EngineError("it has another size than a sealed key", code=errno.EKEYREJECTED)
        error = ffi.new("struct isw_error *")
        fd = ffi.new("int32_t *")
        result = lib.isw_seal_key_load(sealed, _pointer(host_key), fd, error)
        check(result, "cannot open the sealed key", error)
        return int(fd[0])

    def forget(self, fd: int) -> None:
        """The descriptor stays open."""
        check(lib.isw_seal_key_forget(fd), "cannot overwrite the device's key")


def _pointer(host_key: bytearray) -> object:
    if len(host_key) != lib.ISW_SEAL_KEY_BYTES:
        raise ValueError(f"a host key of {len(host_key)} bytes")
    return ffi.from_buffer("uint8_t[]", host_key)
