# SPDX-License-Identifier: Apache-2.0
"""Whose lease a remote of the engine is, kept in the state file for a successor of this process."""

from __future__ import annotations

import msgspec

from infiniswap.device.donors.link_types import Lease
from infiniswap.units import HostPort


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """Not the token: a successor has to renew the lease, which fences what is still on its way."""

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


def encode_record(address: HostPort, lease: Lease) -> bytes:
    """At most 512 bytes: a host's name has 255."""
    return _encoder.encode(
        _Record(
            address.host,
            address.port,
            lease.lease,
            lease.reclaim,
            lease.epoch,
            lease.export_bytes,
            lease.incarnation,
            lease.peer,
        )
    )


def decode_record(data: bytes) -> tuple[HostPort, Lease] | None:
    """None for what is no record: then nobody can reclaim that lease."""
    try:
        record = _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
    lease = Lease(
        lease=record.lease,
        reclaim=record.reclaim,
        epoch=record.epoch,
        token="",
        export_bytes=record.export_bytes,
        incarnation=record.incarnation,
        peer=record.peer,
    )
    return HostPort(record.host, record.port), lease
