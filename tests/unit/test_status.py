# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap status` says of how a device's pages travel."""

from __future__ import annotations

from typing import Any

import pytest

from infiniswap.cli.status import _print_tables, as_json
from infiniswap.device.api import DonorRow
from infiniswap.device.listing import transport_reasons, transports

_OFF = "the donor does not offer RDMA"
_NO_PORT = "here: no RDMA device has a RoCE v2 GID"


def donor(number: int, state: str, transport: str, reason: str = "") -> DonorRow:
    return DonorRow(
        address=f"10.0.0.{number}:9400",
        name="",
        state=state,
        detail="",
        slabs=1,
        read_pages=0,
        write_pages=0,
        errors=0,
        transport=transport,
        transport_reason=reason,
    )


def device(*donors: DonorRow) -> dict[str, Any]:
    return {
        "name": "d1",
        "state": "serving",
        "transport": transports(donors),
        "transport_reasons": transport_reasons(donors),
        "degraded": ["no CAP_SYS_RESOURCE"],
    }


def printed(capsys: pytest.CaptureFixture[str], row: dict[str, Any]) -> list[str]:
    _print_tables([], [row])
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
    _print_tables([], [{"name": "d0", "state": "stopped"}, device(donor(1, "mapped", "tcp"))])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["d0", "stopped"] in lines
    assert ["d1", "serving", "tcp", "1"] in lines
