# SPDX-License-Identifier: Apache-2.0
"""The C library bound to the protocols of `infiniswap.engine.protocol`.

Threads: every method may be called on any thread, and several at once; the C library locks where
it has to. Methods that the protocol marks *blocking* wait in C with the GIL released, so they
belong on a worker thread (`asyncio.to_thread`), never on the event loop's. `close()` waits for
the calls in progress, so that none of them is left with a freed handle.

Memory: C keeps no pointer into Python's memory after a call has returned.

A handle that is dropped without `close()` raises ResourceWarning and is then closed.
"""

from __future__ import annotations

from infiniswap.engine.binding import library_features, library_version
from infiniswap.engine.native_engine import NativeEngine
from infiniswap.engine.native_frontend import NativeFrontend
from infiniswap.engine.native_store import NativeStore

__all__ = [
    "NativeEngine",
    "NativeFrontend",
    "NativeStore",
    "library_features",
    "library_version",
]
