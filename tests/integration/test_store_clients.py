# SPDX-License-Identifier: Apache-2.0
"""A donor's data port and the NBD clients of the world."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import run
from support.devices.nbd_client import fio_verifies, nbdinfo
from support.donors.lent_store import MANY, LentStore, lent_store

from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native


@pytest.fixture
def lent() -> Iterator[LentStore]:
    with lent_store() as store:
        yield store
        assert store.store.stats()["protocol_errors"] == 0


@pytest.mark.requires_tool("nbdinfo")
def test_nbdinfo_describes_a_lease(lent: LentStore) -> None:
    described = nbdinfo(lent.uri)
    assert described["export-size"] == lent.slab_bytes * lent.slots
    assert described["block_size_preferred"] == 4096


@pytest.mark.requires_tool("nbdcopy", "nbdsh")
def test_nbdcopy_brings_back_what_it_has_copied_in(lent: LentStore, tmp_path: Path) -> None:
    # A lease whose every slot is mapped, for nbdcopy copies exports as a whole.
    for mapped in lent.mapped:
        lent.store.unmap(lent.lease, mapped.slot, mapped.generation, 1000)
        lent.store.scrub()
    full = lent.store.lease_create(4)
    ticket = lent.store.ticket(full, 0, uses=MANY)
    for slab in range(4):
        assert lent.store.map(full, slab) is not None
    uri = f"nbd://127.0.0.1:{lent.port}/{ticket}"
    original, back = tmp_path / "in", tmp_path / "out"
    original.write_bytes(os.urandom(12 * MIB) + bytes(4 * MIB) + os.urandom(16 * MIB))
    run("nbdcopy", "--flush", "--connections=4", "--requests=16", original, uri)
    run("nbdcopy", "--connections=4", uri, back)
    assert back.read_bytes() == original.read_bytes()
    stats = lent.store.lease_stats(full)
    assert stats.read_bytes >= 32 * MIB


@pytest.mark.requires_tool("nbdsh")
def test_nbdsh_meets_slots_and_limits(lent: LentStore) -> None:
    script = f"""
slab, slots = {lent.slab_bytes}, {lent.slots}
h.set_strict_mode(0)
def refused(errno, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errno == errno, (call, args, error.errno)
    else:
        raise AssertionError((call, args))
h.pwrite(b"a" * 8192, slab - 8192)
h.pwrite(b"b" * 4096, slab)
assert h.pread(8192, slab - 8192) == b"a" * 8192
refused("EINVAL", h.pread, 8192, slab - 4096)
refused("EINVAL", h.pwrite, b"x" * 8192, slab - 4096)
empty = slab * (slots - 1)
refused("EIO", h.pread, 4096, empty)
refused("EIO", h.pwrite, b"x" * 4096, empty)
refused("EINVAL", h.pread, 4096, slab * slots)
refused("ENOSPC", h.pwrite, b"x" * 4096, slab * slots)
h.pwrite(b"odd", 5)
assert h.pread(5, 4) == bytes(1) + b"odd" + bytes(1)
h.trim(4096, slab - 8192)
h.zero(1, slab)
assert h.pread(8192, slab - 8192) == bytes(4096) + b"a" * 4096
assert h.pread(4096, slab) == bytes(1) + b"b" * 4095
h.flush()
other = nbd.NBD()
other.connect_uri({lent.uri!r})
other.pwrite(b"c" * 4096, 2 * slab, nbd.CMD_FLAG_FUA)
assert h.pread(4096, 2 * slab) == b"c" * 4096
"""
    run("nbdsh", "-u", lent.uri, "-c", script)
    assert lent.store.stats()["request_errors"] == 6


@pytest.mark.requires_tool("fio")
@pytest.mark.parametrize("block", ["4k", "64k"])
def test_fio_verifies_what_it_wrote(lent: LentStore, tmp_path: Path, block: str) -> None:
    options = (f"--bs={block}", "--iodepth=32", f"--size={lent.size_bytes}")
    fio_verifies(lent.uri, tmp_path, *options)
    stats = lent.store.stats()
    assert stats["request_errors"] == 0
    assert stats["write_bytes"] == stats["read_bytes"] == lent.size_bytes
