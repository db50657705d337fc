# SPDX-License-Identifier: Apache-2.0
"""How a link comes by its lease."""

from __future__ import annotations

from infiniswap.control.client import Session
from infiniswap.control.fields import SLOTS_MAX
from infiniswap.device.donors.link_types import Lease, LinkConfig
from infiniswap.errors import ProtocolMismatchError
from infiniswap.units import HostPort

_SPARE_SLOTS = 16
"""Of a lease. One whose slab was taken by force is not used again while old connections live;
without another one the donor would have to cut all of them."""


async def lease_of(session: Session, config: LinkConfig, address: HostPort) -> Lease:
    """A new lease with a slot for each slab of the device.

    Raises:
        ProtocolMismatchError: it is of another size.
        InfiniswapError: refused, or unreachable.
    """
    slots_max = min(config.slab_count + _SPARE_SLOTS, SLOTS_MAX)
    answer = await session.lease(slots_max)
    if answer.export_bytes != slots_max * config.device.slab_bytes:
        # Both transports take it for the size of what is there.
        raise ProtocolMismatchError(
            f"the donor answered with {answer.export_bytes} bytes to a request for a lease of "
            f"{slots_max} slabs",
            where=f"donor {address}",
        )
    return Lease.granted(answer, session.welcome.incarnation, session.peer)
