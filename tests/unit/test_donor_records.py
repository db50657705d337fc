# SPDX-License-Identifier: Apache-2.0
"""What a daemon writes down for its successor."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
from support.donors.lease_records import lease_record as record
from support.machine.at_once import at_once

from infiniswap.donor.leases import LeaseState, LeaseTable
from infiniswap.donor.records import DonorRecord, FileRecords
from infiniswap.donor.written_leases import WrittenLeases
from infiniswap.engine.store import StoreConfig
from infiniswap.errors import InfiniswapError
from infiniswap.testing.store import FakeStore
from infiniswap.units import MIB


@pytest.fixture
def records(tmp_path: Path) -> FileRecords:
    made = FileRecords(tmp_path)
    assert made.load() == []
    return made


def test_leases_come_back_oldest_first(records: FileRecords) -> None:
    for lease in (10, 2, 33):
        records.save(record(lease))
    records.save(record(2, epoch=7))
    records.remove(33)
    records.remove(34)
    assert records.load() == [record(2, epoch=7), record(10)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("3.json", ""),
        ("3.json", "{"),
        ("3.json", "\xff"),
        ("3.json", '{"lease": 3}'),
        ("03.json", None),
        ("4.json", None),
        ("x.json", None),
        ("3.json.bak", None),
    ],
)
def test_what_is_no_record_is_removed(
    records: FileRecords,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    text: str | None,
) -> None:
    """None: a whole record."""
    records.save(record(3))
    path = (tmp_path / "leases/3.json").rename(tmp_path / "leases" / name)
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert records.load() == []
    assert not path.exists()
    assert name in caplog.text


def test_a_record_that_was_being_written_counts_as_the_old_one(
    records: FileRecords, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records.save(record(3))
    (tmp_path / "leases" / ".3.json").write_text('{"lease": 3, "dev')
    assert records.load() == [record(3)]
    assert not caplog.records
    assert [path.name for path in (tmp_path / "leases").iterdir()] == ["3.json"]


def test_the_donor_s_own_record(records: FileRecords, tmp_path: Path) -> None:
    own = DonorRecord(1, record(1).device_id, "a" * 32, MIB, "boot")
    assert records.donor() is None
    records.save_donor(own)
    assert records.donor() == own
    records.remove_donor()
    assert records.donor() is None
    (tmp_path / "donor.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("{}")
    assert records.donor() is None


class FullDisk:
    """Takes nothing."""

    def save(self, _lease: object) -> None:
        raise InfiniswapError("no space")

    remove = save


async def test_a_lease_that_cannot_be_written_down_is_served_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, counters = LeaseTable(10.0, 4), Counter[str]()
    keeping = WrittenLeases(table, FullDisk(), at_once, counters)
    lease = table.grant(record(1), 0, 0.0)
    await keeping.write_down(lease)
    await keeping.strike_out(lease)
    assert counters["records_failed"] == 2
    assert "will not survive a restart" in caplog.text


async def test_a_lease_that_has_ended_is_not_written_down_again(records: FileRecords) -> None:
    table = LeaseTable(10.0, 4)
    keeping = WrittenLeases(table, records, at_once, Counter())
    lease = table.grant(record(1), 0, 0.0)
    await keeping.write_down(lease)
    assert [one.lease for one in records.load()] == [1]
    table.remove(1)
    await keeping.strike_out(lease)
    await keeping.write_down(lease)
    assert records.load() == []


def test_a_lease_that_was_taken_over_has_a_whole_grace_period() -> None:
    table, counters = LeaseTable(10.0, 4), Counter[str]()
    keeping = WrittenLeases(table, None, at_once, counters)
    store = FakeStore(StoreConfig(slab_bytes=MIB, slabs_max=4))
    keeping.restore([record(3, epoch=5)], store, 100.0)
    entry = table.get(3)
    assert entry is not None
    assert (entry.state, entry.grace_until_s, entry.record.epoch) == (LeaseState.GRACE, 110.0, 5)
    assert store.lease_stats(3).epoch == 5
    table.session_opened(9)
    assert (
        table.reclaim(3, entry.record.device_id, entry.record.reclaim, 5, 9).state
        is LeaseState.ACTIVE
    )
    assert counters["leases_restored"] == 1
