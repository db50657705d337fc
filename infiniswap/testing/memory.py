# SPDX-License-Identifier: Apache-2.0
"""A host's memory in two numbers."""

from __future__ import annotations

from infiniswap.donor.memory import MemoryFigures
from infiniswap.errors import SystemCallError
from infiniswap.system.memory import Cache


class FakeMemory:
    """A MemorySource whose figures the test sets.

    Args:
        total_bytes: memory of the host.
        others_bytes: in use by everything but the pool.
        store: a FakeStore; its slabs count as used.
    """

    def __init__(self, total_bytes: int, others_bytes: int = 0, store: object = None) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = others_bytes
        self.store = store
        self.broken = False
        self.reads = 0
        self.file_bytes = 0
        self._refault_bytes = 0
        self.refault_step_bytes = 0

    @property
    def name(self) -> str:
        """For status."""
        return "fake"

    def read(self) -> MemoryFigures:
        """The figures; SystemCallError while `broken`."""
        self.reads += 1
        if self.broken:
            raise SystemCallError("cannot read the memory figures", where="fake")
        pool_bytes = int(getattr(self.store, "pool_bytes", 0))
        used_bytes = self.others_bytes + pool_bytes
        return MemoryFigures(self.total_bytes, max(0, self.total_bytes - used_bytes))

    def cache(self) -> Cache:
        """The figures that the test sets: `file_bytes` is part of what is available, and
        `refault_step_bytes` have refaulted since the last reading."""
        self._refault_bytes += self.refault_step_bytes
        return Cache(self.file_bytes, self._refault_bytes)
