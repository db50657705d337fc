# SPDX-License-Identifier: Apache-2.0
"""What a lease is for: said by the device, kept by the donor, also between old and new ends."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.specs import device_spec
from support.donors.lease_records import lease_record
from support.donors.refusals import refused

from infiniswap import config as configuration
from infiniswap.control import messages as m
from infiniswap.device.jobs.started_by import label, started_by
from infiniswap.device.spec.spec import StartedBy, decode_spec, encode_spec
from infiniswap.donor.leases import LeaseTable
from infiniswap.donor.records import FileRecords
from infiniswap.donor.traffic import Traffic
from infiniswap.errors import ConfigError, ProtocolMismatchError
from infiniswap.fields import LABEL_LENGTH_MAX
from infiniswap.units import PAGE_BYTES

USE = m.LeaseUse(job="prep.py", user="ada", uid=1000, tenant="physics")


# ------------------------------------------------------------------------------ labels


@given(st.text())
def test_a_label_is_one_short_printable_line(text: str) -> None:
    made = label(text)
    assert made.isprintable()
    assert len(made) <= LABEL_LENGTH_MAX
    assert made == made.strip() == label(made)


@given(st.text(st.characters(whitelist_categories=("L", "N")), max_size=LABEL_LENGTH_MAX))
def test_what_is_a_label_already_stays(text: str) -> None:
    assert label(text) == text


def test_the_job_is_the_program_alone() -> None:
    assert started_by({}, 0, "/usr/bin/py\x1b[31mthon3").job == "py?[31mthon3"
    assert started_by({}, 0, "prep.py").job == "prep.py"
    assert started_by({}, 0).job == ""


def test_the_user_is_whoever_called_sudo() -> None:
    own = started_by({}, 0)
    assert (own.user, own.uid) == ("root", 0)
    nobody = pwd.getpwnam("nobody")
    by_sudo = started_by({"SUDO_UID": str(nobody.pw_uid)}, 0)
    assert (by_sudo.user, by_sudo.uid) == ("nobody", nobody.pw_uid)
    # Nobody becomes somebody else by a variable.
    assert started_by({"SUDO_UID": "0"}, nobody.pw_uid).uid == nobody.pw_uid
    for wrong in ("", "-1", "x", "²", str(1 << 40)):
        assert started_by({"SUDO_UID": wrong}, 0).uid == 0


def test_a_user_without_a_name_is_known_by_number() -> None:
    assert started_by({"SUDO_UID": "3999999999"}, 0) == StartedBy(user="", uid=3_999_999_999)


# ------------------------------------------------------------------------------ device


def test_a_device_tells_what_it_may() -> None:
    by = StartedBy(job="prep.py", user="ada", uid=1000)
    told = msgspec.structs.replace(device_spec(configuration.Config()), started_by=by)
    assert told.use == m.LeaseUse(job="prep.py", user="ada", uid=1000)
    flags = {"device.tenant": "physics", "device.tell_user": "false"}
    quiet = configuration.load(Path(os.devnull), flags, {})
    assert msgspec.structs.replace(told, config=quiet).use == m.LeaseUse(tenant="physics")


def test_a_record_keeps_for_whom_a_device_was_started() -> None:
    by = StartedBy(job="prep.py", user="ada", uid=1000)
    told = msgspec.structs.replace(device_spec(configuration.Config()), started_by=by)
    assert decode_spec(encode_spec(told), "here").started_by == by
    older = json.loads(encode_spec(told))
    del older["started_by"]
    assert decode_spec(json.dumps(older).encode(), "here").started_by == StartedBy()


@pytest.mark.parametrize("tenant", ["a\nb", "\x1b[31m", " a", "x" * (LABEL_LENGTH_MAX + 1)])
def test_a_tenant_is_one_short_printable_line(tenant: str) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        configuration.load(Path(os.devnull), {"device.tenant": tenant}, {})


# ---------------------------------------------------------------------------- messages


class OldLease(msgspec.Struct, tag="lease", tag_field="type"):
    """As a daemon knew it that did not know LeaseUse."""

    id: int
    slots_max: int


class OldRenew(msgspec.Struct, tag="renew", tag_field="type"):
    """The same."""

    id: int
    lease: int
    reclaim: str
    epoch: int


class OldMemory(msgspec.Struct, tag="memory", tag_field="type"):
    """The same; nor did it know tenants."""

    id: int


def test_older_ends_understand_requests_and_are_understood() -> None:
    renew = m.RenewRequest(id=2, lease=3, reclaim="a" * 32, epoch=4, use=USE)
    for new, old in (
        (m.LeaseRequest(id=1, slots_max=8, use=USE), OldLease(1, 8)),
        (renew, OldRenew(2, 3, "a" * 32, 4)),
    ):
        assert m.decode_to_donor(m.encode(new)) == new
        assert msgspec.json.decode(m.encode(new), type=type(old)) == old
        without = m.decode_to_donor(msgspec.json.encode(old))
        assert without == msgspec.structs.replace(new, use=None)
        assert m.encode(without) == msgspec.json.encode(old)
    question = m.MemoryRequest(id=1, tenant="physics")
    assert msgspec.json.decode(m.encode(question), type=OldMemory) == OldMemory(1)
    assert m.decode_to_donor(msgspec.json.encode(OldMemory(1))) == m.MemoryRequest(id=1)
    assert m.encode(m.MemoryRequest(id=1)) == msgspec.json.encode(OldMemory(1))


def test_what_a_device_says_is_cleaned_and_bounded() -> None:
    evil = m.LeaseRequest(id=1, slots_max=8, use=m.LeaseUse(job="a\x1b[2J\nERROR b\u202e"))
    said = m.decode_to_donor(m.encode(evil))
    assert isinstance(said, m.LeaseRequest)
    assert said.use == m.LeaseUse(job="a?[2J?ERROR b?")
    for wrong in ({"job": "x" * 129}, {"user": 7}, {"uid": -1}, {"tenant": None}):
        frame = {"type": "lease", "id": 1, "slots_max": 8, "use": wrong}
        with pytest.raises(ProtocolMismatchError):
            m.decode_to_donor(json.dumps(frame))


# ------------------------------------------------------------------------------- donor


def test_a_renewal_replaces_what_is_known_if_it_says_anything() -> None:
    table = LeaseTable(grace_s=10.0, leases_max=4)
    table.session_opened(1)
    lease = table.grant(lease_record(7, use=USE, granted_unix_s=5.0), 1, 0.0)
    table.renewed(7, 2)
    assert lease.record == lease_record(7, use=USE, granted_unix_s=5.0, epoch=2)
    other = m.LeaseUse(tenant="chemistry")
    table.renewed(7, 3, other)
    assert (lease.record.use, lease.record.granted_unix_s) == (other, 5.0)


def test_records_keep_it_and_older_and_newer_records_are_read(tmp_path: Path) -> None:
    records = FileRecords(tmp_path)
    assert records.load() == []
    whole = lease_record(3, use=USE, granted_unix_s=1_700_000_000.25)
    records.save(whole)
    assert records.load() == [whole]
    path = tmp_path / "leases/3.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "colour": "red"}))
    assert records.load() == [whole]
    del fields["use"], fields["granted_unix_s"]
    path.write_text(json.dumps(fields))
    assert records.load() == [lease_record(3)]
    assert path.exists()


def test_another_device_learns_nothing_and_changes_nothing() -> None:
    table = LeaseTable(grace_s=10.0, leases_max=4)
    table.session_opened(1)
    lease = table.grant(lease_record(7, use=USE), 1, 0.0)
    table.session_opened(2)
    other = "00000000-0000-0000-0000-0000000000ff"
    with refused(m.REFUSED_UNKNOWN_LEASE):
        table.reclaim(7, other, "5" * 32, 1, 2)
    assert lease.record.use == USE


def test_traffic_is_the_average_of_pages() -> None:
    traffic, seen = Traffic(), []
    pages = PAGE_BYTES
    for total, now_s in ((0, 0.0), (100 * pages, 1.0), (100 * pages, 1.0), (100 * pages, 2.0)):
        traffic.take(total, now_s)
        seen.append(traffic.pages_per_s)
    assert seen[:3] == [None, 100.0, 100.0]  # at the third count no time has passed
    assert seen[3] == pytest.approx(80.0)


@given(st.lists(st.integers(0, 1 << 50)))
def test_traffic_is_never_below_zero(totals: list[int]) -> None:
    """A restarted daemon counts from zero."""
    traffic = Traffic()
    for at, total in enumerate(totals):
        traffic.take(total, float(at))
        assert traffic.pages_per_s is None or traffic.pages_per_s >= 0.0
