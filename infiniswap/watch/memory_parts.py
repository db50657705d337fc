# SPDX-License-Identifier: Apache-2.0
"""What a donor's memory is used for, in the parts of which the views draw a bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infiniswap.control.messages import Status


def memory_parts(status: Status) -> dict[str, int]:
    """Bytes by part, in the order of a bar; together they are all of the memory.

    Lent and pooled slabs are memory of the daemon. Of what is available to programs, page cache
    that is in use counts as used, as for lending; then comes the headroom as far as there is that
    much, and the rest is free.
    """
    memory, pool = status.memory, status.pool
    lent = pool.slabs_mapped * status.slab_bytes
    pooled = (pool.slabs_free + pool.slabs_dirty) * status.slab_bytes
    cache = min(memory.cache_bytes, memory.available_bytes)
    left = memory.available_bytes - cache
    headroom = min(memory.headroom_bytes, left)
    return {
        "own": max(0, memory.total_bytes - memory.available_bytes - lent - pooled),
        "cache": cache,
        "lent": lent,
        "pool": pooled,
        "free": left - headroom,
        "headroom": headroom,
    }
