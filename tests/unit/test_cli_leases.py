# SPDX-License-Identifier: Apache-2.0
"""`infiniswap donor leases` and the leases of `status`: who uses a donor's memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.donors.hostile_donor import EVIL, lease, status

from infiniswap.cli import donor as command
from infiniswap.cli.status import _print_tables
from infiniswap.control import messages as m
from infiniswap.units import GIB, HostPort
from infiniswap.watch import leases
from infiniswap.watch.asking import AskedDonor

ADDRESS = HostPort("10.0.0.1", 9400)


def of(*found: dict[str, Any], **changes: Any) -> m.Status:
    """A status with these leases."""
    mapped = sum(one["slots_mapped"] for one in found)
    return msgspec.convert(
        status(leases=list(found), pool__slabs_mapped=mapped, **changes), m.Status
    )


SMALL = lease(
    lease=1,
    host_name="near",
    slots_mapped=1,
    job="sort",
    user="ada",
    uid=1000,
    host_certified=False,
)
LARGE = lease(
    lease=2,
    host_name="far",
    slots_mapped=2,
    tenant="physics",
    host_certified=True,
    granted_unix_s=1_700_000_000.0,
    transport="rdma",
)


def printed(capsys: pytest.CaptureFixture[str], found: m.Status) -> list[str]:
    command._print_leases(ADDRESS, found)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_largest_lease_is_first_and_totals_follow(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, of(SMALL, LARGE))
    rows = [line.split() for line in lines]
    far = next(row for row in rows if row[:1] == ["far"])
    near = next(row for row in rows if row[:1] == ["near*"])
    assert rows.index(far) < rows.index(near)
    assert far[:8] == ["far", "-", "-", "physics", "swap0", "2.00", "GiB", "-"]
    assert far[8:] == ["2023-11-14", "22:13", "rdma"]
    assert near == ["near*", "sort", "ada", "swap0", "1.00", "GiB", "-", "-", "-"]
    assert leases.CLAIMED_NOTE in lines
    assert "lent: 3.00 GiB of at most 4.00 GiB" in lines
    by_tenant = "by tenant (by host where none is told): physics 2.00 GiB, near 1.00 GiB"
    assert by_tenant in lines
    assert lines[-1].endswith(f"infiniswap donor drain {ADDRESS}")


def test_columns_that_say_nothing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    heading = next(line for line in printed(capsys, of(SMALL)) if "host" in line.split())
    assert "tenant" not in heading
    assert "state" not in heading
    away = {**SMALL, "state": "grace"}
    heading = next(line for line in printed(capsys, of(away)) if "host" in line.split())
    assert "state" in heading


def test_no_lease_and_a_drain_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, of()) == [f"Nobody uses memory of donor ({ADDRESS})."]
    assert "drains" in printed(capsys, of(SMALL, draining=True))[-1]


def test_text_of_others_moves_no_cursor_and_is_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Even if it had come here without being cleaned."""
    evil = {**SMALL, "job": EVIL, "user": "[red]ada[/red]", "tenant": EVIL, "host_name": "a"}
    found = of(evil, LARGE)
    for text in ("\n".join(printed(capsys, found)), _status(capsys, found)):
        assert text.replace("\n", "").isprintable()
        assert "[red]ada[/red]" in text.replace("\n", "")


def _status(capsys: pytest.CaptureFixture[str], found: m.Status) -> str:
    _print_tables([AskedDonor(ADDRESS, found, "")], [])
    return capsys.readouterr().out


def test_status_names_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in _status(capsys, of(SMALL, LARGE)).splitlines()]
    assert ["donor", "near*", "sort", "ada", "swap0", "1.00", "GiB", "-", "-", "-"] in rows


def test_json_has_what_the_donor_says_and_sums() -> None:
    found = command.leases_json(ADDRESS, of(SMALL, LARGE))
    assert [one["lease"] for one in found["leases"]] == [2, 1]
    assert found["tenants"] == {"physics": 2 * GIB, "near": GIB}
    assert (found["lent_bytes"], found["limit_bytes"]) == (3 * GIB, 4 * GIB)
    large, small = found["leases"]
    assert large["since"] == "2023-11-14T22:13:20+00:00"
    assert (large["held_bytes"], large["host_certified"]) == (2 * GIB, True)
    assert (small["since"], small["job"], small["uid"]) == (None, "sort", 1000)


def test_an_older_daemon_says_less(capsys: pytest.CaptureFixture[str]) -> None:
    old = lease(slots_mapped=1)
    assert not old.keys() & {"job", "user", "tenant", "granted_unix_s"}
    (one,) = command.leases_json(ADDRESS, of(old))["leases"]
    assert (one["job"], one["user"], one["uid"], one["since"]) == ("", "", None, None)
    assert (one["pages_per_s"], one["host_certified"]) == (None, None)
    lines = printed(capsys, of(old))
    assert leases.CLAIMED_NOTE not in lines
    assert any(line.split()[:3] == ["consumer", "-", "-"] for line in lines)


def test_a_clock_that_was_far_off_is_no_failure() -> None:
    far = {**SMALL, "granted_unix_s": 1e300}
    assert command.leases_json(ADDRESS, of(far))["leases"][0]["since"] is None
