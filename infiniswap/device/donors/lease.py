# SPDX-License-Identifier: Apache-2.0
"""The lease that a device holds at a donor: how the donor grants it, and how it is recorded.

The record is kept in the state file, for a successor of the device's process.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from infiniswap.control import messages as m
from infiniswap.control.client import Session
from infiniswap.errors import InfiniswapError, ProtocolMismatchError, RequestRefusedError
from infiniswap.fields import SLOTS_MAX
from infiniswap.units import HostPort, counted

_SPARE_SLOTS = 16
"""More than there are slabs. A slot whose slab was taken by force stays empty while old connections
live; without a spare one the donor would have to cut all of them."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that a device holds.

    Attributes:
        peer: where it was granted or renewed last: the donor's address in figures, or empty. By the
            time the lease has to be reclaimed, nobody may be able to resolve the donor's name.
    """

    lease: int
    reclaim: str
    epoch: int
    export_bytes: int
    incarnation: str
    peer: str = ""

    def is_same(self, other: HeldLease) -> bool:
        """Whether both are the same lease, renewed or not."""
        return (self.lease, self.incarnation) == (other.lease, other.incarnation)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slab is: slot and generation on the donor."""

    slot: int
    generation: int


class LeaseGoneError(InfiniswapError):
    """The lease cannot be reclaimed: the donor has forgotten it."""


def is_gone(error: Exception) -> bool:
    """Whether it is useless to try again after this error. It is not after REFUSED_BUSY."""
    if isinstance(error, RequestRefusedError):
        return error.reason != m.REFUSED_BUSY
    return isinstance(error, LeaseGoneError)


async def new_lease(
    session: Session, slab_count: int, slab_bytes: int, connections: int
) -> HeldLease:
    """Asks for a lease with a slot for each of `slab_count` slabs, which will have so many data
    connections.

    Raises:
        ProtocolMismatchError: the granted lease has another size.
        InfiniswapError: refused, or unreachable.
    """
    slots_max = min(slab_count + _SPARE_SLOTS, SLOTS_MAX)
    answer = await session.lease(slots_max, connections)
    if answer.export_bytes != slots_max * slab_bytes:
        # Every transport relies on this size.
        raise ProtocolMismatchError(
            f"the donor answered with {answer.export_bytes} bytes to a request for a lease of "
            f"{counted(slots_max, 'slab')}",
            where=f"donor {session.address}",
        )
    names = ("lease", "reclaim", "epoch", "export_bytes")
    granted = {name: getattr(answer, name) for name in names}
    return HeldLease(**granted, incarnation=session.welcome.incarnation, peer=session.peer)


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """A successor has to renew the lease, which fences old connections."""

    host: str
    port: int
    lease: int
    reclaim: str
    epoch: int
    export_bytes: int
    incarnation: str
    peer: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)
_NAMES = _Record.__struct_fields__[2:]


def encode_record(address: HostPort, lease: HeldLease) -> bytes:
    """At most 512 bytes: a host's name has 255."""
    of_lease = {name: getattr(lease, name) for name in _NAMES}
    return _encoder.encode(_Record(address.host, address.port, **of_lease))


def decode_record(data: bytes) -> tuple[HostPort, HeldLease] | None:
    """None for bytes that are no record: that lease cannot be reclaimed."""
    try:
        record = _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
    of_lease = {name: getattr(record, name) for name in _NAMES}
    return HostPort(record.host, record.port), HeldLease(**of_lease)
