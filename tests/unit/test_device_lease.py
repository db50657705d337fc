# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.lease: granted, recorded, and found by a successor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from infiniswap.control.messages import LeaseAnswer
from infiniswap.device.donors.lease import (
    HeldLease,
    Place,
    decode_record,
    encode_record,
    new_lease,
)
from infiniswap.device.slabs.after_take_over import restore_links
from infiniswap.errors import ProtocolMismatchError
from infiniswap.units import MIB, HostPort

_LEASE = HeldLease(7, "ab" * 16, 3, 1 << 40, "ef" * 16, "10.0.0.2")
_ADDRESS = HostPort("donor.example", 9400)


@pytest.mark.parametrize("export_bytes", [0, 16 * MIB, 18 * MIB, (1 << 53) - 1])
async def test_a_lease_of_another_size_than_was_asked_for_is_refused(export_bytes: int) -> None:
    async def lease(slots_max: int, connections: int) -> LeaseAnswer:
        assert (slots_max, connections) == (17, 2)
        return LeaseAnswer(
            id=0,
            lease=7,
            epoch=1,
            reclaim="1" * 32,
            export_bytes=export_bytes,
            grace_ms=1,
        )

    session = SimpleNamespace(lease=lease, address=_ADDRESS)
    with pytest.raises(ProtocolMismatchError, match="17 slabs"):
        await new_lease(cast(Any, session), 1, MIB, 2)


def test_a_record_has_all_of_the_lease() -> None:
    known = decode_record(encode_record(_ADDRESS, _LEASE))
    assert known is not None
    address, lease = known
    assert address == _ADDRESS
    assert lease == HeldLease(7, "ab" * 16, 3, 1 << 40, "ef" * 16, "10.0.0.2")


def test_a_record_of_a_release_that_kept_names_only_is_read() -> None:
    old = ["donor.example", 9400, 7, "ab" * 16, 3, 1 << 40, "ef" * 16]
    assert decode_record(msgspec.msgpack.encode(old)) == (
        _ADDRESS,
        HeldLease(7, "ab" * 16, 3, 1 << 40, "ef" * 16),
    )


def test_the_longest_record_fits() -> None:
    lease = HeldLease(2**64 - 1, "ab" * 16, 2**64 - 1, 2**64 - 1, "ef" * 16, "f" * 45)
    assert len(encode_record(HostPort("h" * 255, 65535), lease)) <= 512


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x91\x01", encode_record(_ADDRESS, _LEASE)[:-3]])
def test_what_is_no_record_is_nobodys(data: bytes) -> None:
    assert decode_record(data) is None


def _slab(remote: int | None, source: int | None = None) -> Any:
    return SimpleNamespace(
        remote=remote,
        slot=1,
        generation=11,
        source_remote=source,
        source_slot=2,
        source_generation=22,
    )


class _Link:
    def __init__(self, address: HostPort) -> None:
        self.address = address
        self.inherited: tuple[Any, ...] = ()

    def inherit(self, remote: int, lease: HeldLease, mapped: dict[int, Place]) -> None:
        self.inherited = (remote, lease.lease, mapped)


def _restore(
    records: dict[int, bytes], slabs: list[Any], links: list[_Link]
) -> list[tuple[object, ...]]:
    """What is done with slabs and remotes that no link gets."""
    done: list[tuple[object, ...]] = []
    engine = SimpleNamespace(
        slabs=lambda: slabs,
        remotes=lambda: [SimpleNamespace(remote=number, state="down") for number in records],
        remote_record=records.__getitem__,
        slab_unmap=lambda *args: done.append(("unmap", *args)),
        remote_destroy=lambda remote: done.append(("destroy", remote)),
    )
    known_donors = SimpleNamespace(links=links)
    mapper = SimpleNamespace(
        known_donors=known_donors, lost=lambda slab: done.append(("lost", slab))
    )
    restore_links(cast(Any, engine), cast(Any, mapper), cast(Any, _Link))
    return done


def test_each_remote_finds_its_link_and_a_slab_may_be_at_two() -> None:
    other = HostPort("other", 1)
    records = {0: encode_record(_ADDRESS, _LEASE), 3: encode_record(other, _LEASE)}
    links = [_Link(_ADDRESS)]
    assert not _restore(records, [_slab(0), _slab(None), _slab(3, source=0)], links)
    assert links[0].inherited == (0, 7, {0: Place(1, 11), 2: Place(2, 22)})
    assert links[1].address == other  # not named any more: it gets a link all the same
    assert links[1].inherited == (3, 7, {2: Place(1, 11)})


def test_a_remote_without_a_record_is_given_up() -> None:
    done = _restore({2: b"garbage"}, [_slab(None), _slab(2)], [])
    assert done == [("unmap", 1, 2, 11), ("lost", 1), ("destroy", 2)]
