# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap status` says of donors, and of how a device's pages travel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.devices.device_status import donor_row
from support.donors.hostile_donor import status

from infiniswap.cli.status import _DONOR_ERRORS, _print_tables, as_json, lendable
from infiniswap.control import explain
from infiniswap.control import messages as m
from infiniswap.device import api
from infiniswap.device.control.listing import transport_reasons, transports
from infiniswap.donor.report import OF_THE_DATA_PORT
from infiniswap.errors import InfiniswapError, NoDonorError, WrongSecretError
from infiniswap.units import GIB, MIB, HostPort
from infiniswap.watch.asking import AskedDonor

ADDRESS = HostPort("10.0.0.1", 9400)

_OFF = "the donor does not offer RDMA"
_NO_PORT = "here: no RDMA device has a RoCE v2 GID"


def donor(number: int, state: str, transport: str, reason: str = "") -> api.DonorRow:
    row = donor_row(f"10.0.0.{number}:9400", "", state)
    return msgspec.structs.replace(row, transport=transport, transport_reason=reason)


def device(*donors: api.DonorRow) -> dict[str, Any]:
    return {
        "name": "d1",
        "state": "serving",
        "transport": transports(donors),
        "transport_reasons": transport_reasons(donors),
        "degraded": ["no CAP_SYS_RESOURCE"],
    }


def printed(capsys: pytest.CaptureFixture[str], *rows: dict[str, Any]) -> list[str]:
    _print_tables([], [*rows])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_how_pages_travel_and_each_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    off = [donor(number, "mapped", "tcp", _OFF) for number in range(4, 9)]
    found = device(
        donor(1, "mapped", "rdma"),
        donor(2, "mapped", "tcp", _NO_PORT),
        donor(3, "mapped", "rdma"),
        *off,
    )
    assert found["transport"] == {"rdma": 2, "tcp": 6}
    lines = printed(capsys, found)
    assert [line.split() for line in lines if "serving" in line] == [
        ["d1", "serving", "rdma", "2,", "tcp", "6"]
    ]
    assert lines[-3:] == [
        f"device d1: no RDMA to 10.0.0.2:9400: {_NO_PORT}",
        f"device d1: no RDMA to 10.0.0.4:9400, 10.0.0.5:9400, 10.0.0.6:9400 and 2 more: {_OFF}",
        "device d1: no CAP_SYS_RESOURCE",
    ]
    (row,) = as_json([], [found])["devices"]
    assert row["transport"] == {"rdma": 2, "tcp": 6}
    assert row["transport_reasons"][_OFF] == [one.address for one in off]


def test_donors_that_pages_do_not_go_to(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said of those that would be used, were there RDMA; not of those that were used."""
    found = device(
        donor(1, "idle", ""),
        donor(2, "idle", "", _OFF),
        donor(3, "suspended", "tcp", _NO_PORT),
        donor(4, "suspended", "rdma"),
    )
    assert found["transport"] == {}
    lines = printed(capsys, found)
    assert [line for line in lines if "RDMA" in line] == [
        f"device d1: no RDMA to 10.0.0.2:9400: {_OFF}"
    ]


def test_devices_that_say_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped ones, beside one that runs."""
    rows = {"name": "d0", "state": "stopped"}, device(donor(1, "mapped", "tcp"))
    lines = [line.split() for line in printed(capsys, *rows)]
    assert ["d0", "stopped"] in lines
    assert ["d1", "serving", "tcp", "1"] in lines


def row(
    failure: InfiniswapError | None = None, *, draining: bool = False, mapped: int = 0
) -> AskedDonor:
    said = None
    if failure is None:
        said = msgspec.convert(status(draining=draining, pool__slabs_mapped=mapped), m.Status)
    return AskedDonor(ADDRESS, said, "" if failure is None else failure.what, failure)


@pytest.mark.parametrize(
    ("failure", "state"),
    [
        (explain.wrong_secret(ADDRESS, "the cluster secrets differ"), "wrong secret"),
        (explain.wrong_secret(ADDRESS, "none is configured here"), "wrong secret"),
        (explain.not_a_daemon(ADDRESS, "HTTP status 404"), "not a donor"),
        (explain.full(ADDRESS), "busy"),
        (explain.cannot_connect(ADDRESS, ConnectionRefusedError(111, "no")), "unreachable"),
        (NoDonorError("no answer within 3 s"), "unreachable"),
    ],
)
def test_a_donor_that_has_answered_is_not_unreachable(
    failure: InfiniswapError, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = row(failure)
    assert as_json([asked], [])["donors"][0]["state"] == state
    _print_tables([asked], [])
    printed = capsys.readouterr().out
    assert f"{ADDRESS} " in printed
    assert state in printed
    assert ("unreachable" in printed) == (state == "unreachable")


@pytest.mark.parametrize(
    ("draining", "mapped", "state"),
    [(False, 0, "serving"), (False, 3, "serving"), (True, 3, "draining"), (True, 0, "drained")],
)
def test_a_donor_that_has_given_every_slab_back_is_drained(
    draining: bool, mapped: int, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = row(draining=draining, mapped=mapped)
    shown = as_json([asked], [])["donors"][0]
    assert (shown["state"], shown["status"]["draining"]) == (state, draining)
    _print_tables([asked], [])
    assert f"  {state} " in capsys.readouterr().out


def test_what_lies_on_donors_is_told_from_what_was_read_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A device that has written 98.8 MiB, and read nothing yet."""
    figures = {"on_donors_bytes": round(98.8 * MIB), "in_donors_bytes": 0}
    figures |= {"in_disk_bytes": 0, "out_bytes": 200 * MIB}
    lines = printed(capsys, {"name": "d1", "state": "serving", **figures})
    said = " ".join(" ".join(lines).split())
    assert "on donors read from donors read from disk written" in said
    assert "98.8 MiB 0 B 0 B 200 MiB" in said


HEADROOM = "needs its memory itself: 1.00 GiB are available there"


def test_donors_that_lend_nothing_say_why() -> None:
    def told(why: str, can_map: int = 0) -> AskedDonor:
        said = msgspec.convert(status(no_room=why, pool__can_map=can_map), m.Status)
        return AskedDonor(ADDRESS, said, "")

    assert lendable([told("", 4)]) == (4 * GIB, "")
    assert lendable([told(HEADROOM), told("", 1)]) == (GIB, f"{ADDRESS} {HEADROOM}")
    refused = row(explain.wrong_secret(ADDRESS, "the cluster secrets differ"))
    size_bytes, why = lendable([told(HEADROOM), refused, told("")])
    assert size_bytes == 0
    assert why.split("; ") == [
        f"{ADDRESS} {HEADROOM}",
        f"{ADDRESS}: the cluster secrets differ",
        f"{ADDRESS} does not say why",
    ]
    assert lendable([told(HEADROOM)] * 9)[1].endswith("; 6 more")


def test_donors_that_all_have_another_secret_are_not_unreachable() -> None:
    wrong = explain.wrong_secret(ADDRESS, "the cluster secrets differ")
    dead = explain.cannot_connect(ADDRESS, ConnectionRefusedError(111, "no"))
    with pytest.raises(WrongSecretError) as caught:
        lendable([row(wrong), row(wrong)])
    assert caught.value.mend == wrong.mend
    with pytest.raises(NoDonorError, match="can be used") as mixed:
        lendable([row(wrong), row(dead)])
    assert f"{ADDRESS}: the cluster secrets differ" in mixed.value.what


def test_the_reason_is_shown_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = msgspec.convert(status(no_room=HEADROOM, pool__can_map=0), m.Status)
    _print_tables([AskedDonor(ADDRESS, said, "")], [])
    assert f"{ADDRESS}: lends no more slabs: it {HEADROOM}" in capsys.readouterr().out


WIDE = {
    "name": "d1",
    "state": "serving",
    "path": "/dev/loop17",
    "size_bytes": GIB,
    "mapped": "8 of 16 slabs",
    "transport": {"tcp": 2},
    "swap_used_bytes": 403 * MIB,
    "on_donors_bytes": 404 * MIB,
    "in_donors_bytes": 5 * GIB,
    "in_disk_bytes": 914 * MIB,
    "out_bytes": 406 * MIB,
    "awake": True,
    "errors": 0,
    "alarms": "the disk of the backup fails: Input/output error",
}


@pytest.mark.parametrize("columns", [40, 80, 150])
def test_a_narrow_terminal_shows_everything_of_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("TERM", "xterm")
    _print_tables([], [WIDE, WIDE | {"name": "d2", "alarms": ""}])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= columns for line in lines)
    said = " ".join(" ".join(lines).split())
    assert "…" not in said
    for words in ("/dev/loop17", "8 of 16 slabs", "read from disk", "5.00 GiB", "404 MiB"):
        assert words in said
    assert "device d1: ALARM: the disk of the backup fails: Input/output error" in said
    (at,) = [i for i, line in enumerate(lines) if "devices on this host" in line]
    assert sum("d2" in line for line in lines[at:]) == 1


def test_far_memory_has_a_column_where_a_device_has_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_tables([], [WIDE])
    assert "far memory" not in capsys.readouterr().out
    _print_tables([], [WIDE, WIDE | {"name": "d2", "far_used_bytes": 3 * GIB}])
    out = " ".join(capsys.readouterr().out.split())
    assert "far memory" in out
    assert "3.00 GiB" in out


def test_errors_are_said_by_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    said = msgspec.convert(status(), m.Status)
    counters = {"protocol_errors": 1, "secret_errors": 2, "http_errors": 9, "lease_errors": 0}
    said = msgspec.structs.replace(said, counters=counters)
    kinds = {"failed transfers to or from the backup": 4, "others": 0}
    _print_tables([AskedDonor(ADDRESS, said, "")], [WIDE | {"errors": 4, "errors_by_kind": kinds}])
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if line.startswith(" 10.0.0.1:9400 ")]
    assert row[-1] == "3"
    assert (
        "10.0.0.1:9400: errors: control connections that broke the protocol (1), connections with "
        "another secret (2)\n"
    ) in out
    assert "device d1: errors: failed transfers to or from the backup (4)\n" in out
    _print_tables([], [WIDE])
    assert "errors:" not in capsys.readouterr().out


def test_every_error_that_a_donor_counts_has_a_kind(project_root: Path) -> None:
    """In code and in the counters of its store; HTTP ones are of whoever asks."""
    files = [
        *(project_root / "infiniswap/donor").glob("*.py"),
        *(project_root / "infiniswap/control").glob("*.py"),
    ]
    text = "".join(file.read_text() for file in files)
    named = set(re.findall(r'counters\["([a-z_]+_errors)"\]', text))
    header = (project_root / "csrc/include/isw.h").read_text()
    stored = re.findall(r"uint64_t ([a-z]+_errors);", header.partition("isw_engine_stats {")[0])
    named |= {OF_THE_DATA_PORT.get(name, name) for name in stored}
    assert {"request_errors", "harvest_errors"} <= named
    assert named - {"http_errors"} == set(_DONOR_ERRORS)
