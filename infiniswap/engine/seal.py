# SPDX-License-Identifier: Apache-2.0
"""Keys that seal a device's pages, as the rest of the package knows them.

A key is known by a descriptor of memory that neither swap space nor core files get; its bytes never
enter Python. `infiniswap.engine.native_seal` implements this on the C extension. Errors: see
`infiniswap.engine.protocol`.
"""

from __future__ import annotations

from typing import Final, Protocol

SEALED_KEY_BYTES: Final = 60
"""ISW_SEALED_KEY_BYTES of isw.h."""


class SealKeys(Protocol):
    """Makes, keeps and forgets keys."""

    def library(self) -> str:
        """Blocking, some milliseconds. The name of the library that seals pages on this host.

        Raises:
            UnavailableError: this build or this host has none, with what to install.
        """

    def make(self) -> int:
        """A descriptor of a new, random key; the caller closes it."""

    def save(self, fd: int, host_key: bytearray) -> bytes:
        """The key, sealed with a host's, to be kept on disk."""

    def load(self, sealed: bytes, host_key: bytearray) -> int:
        """The reverse of `save`; the caller closes the descriptor. EngineError EKEYREJECTED: sealed
        with another host key, or altered."""

    def forget(self, fd: int) -> None:
        """Overwrites the key for every process that has the descriptor, which stays open."""
