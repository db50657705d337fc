# SPDX-License-Identifier: Apache-2.0
"""What the two ends of an RDMA connection tell each other: the same for the message that carries it
and for the library that connects by it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from infiniswap.fields import U53, Count, Hex128


class RdmaEnd(Struct, frozen=True, array_like=True):
    """One end of an RDMA connection (struct isw_rdma_end)."""

    gid: Hex128
    link: Count
    lid: Count
    mtu_bytes: Count
    reads_max: Count
    number: Count
    psn: Count


class RdmaKey(Struct, frozen=True, array_like=True):
    """Memory of the donor's that the lease's connections reach (struct isw_rdma_key)."""

    address: U53
    rkey: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
