# SPDX-License-Identifier: Apache-2.0
"""`infiniswap device show`: which source was the quicker, and what is far."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest
from support.devices.device_status import device_status, donor_row

from infiniswap.cli.device.tables import describe
from infiniswap.device.api import FarRow
from infiniswap.units import GIB


def row(name: str, **changes: Any) -> str:
    stats: dict[str, int] = defaultdict(int)
    slow = msgspec.structs.replace(donor_row("10.0.0.2:9", "moon", "mapped"), expected_us=331.4)
    (text,) = (
        text
        for found, text in describe(device_status(stats=stats, donors=[slow], **changes))
        if found == name
    )
    return text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backup": None}, "donors: there is no backup"),
        ({}, "no page-in yet for which there was a choice"),
        (
            {"chosen_share": 0.125, "backup_expected_us": 56.6},
            "donors 12.5%, backup 87.5%, a page in 57 µs (of the page-ins that both could serve)",
        ),
        (
            {"chosen_share": 1.0},
            "donors 100.0%, backup 0.0% (of the page-ins that both could serve)",
        ),
    ],
)
def test_the_quicker_source_is_told(changes: dict[str, Any], text: str) -> None:
    assert row("quicker source", **changes) == text


def test_each_donor_tells_how_soon_it_answers() -> None:
    assert row("donor") == "10.0.0.2:9 moon: mapped, 1 slab, a page in 331 µs"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "1.50 GiB of 4.00 GiB in use, by 2 processes"),
        ({"processes": 1}, "1.50 GiB of 4.00 GiB in use, by 1 process"),
        (
            {"problem": "no memory"},
            "1.50 GiB of 4.00 GiB in use, by 2 processes; not served: no memory",
        ),
        (
            {"counts": dict.fromkeys(("pages_out", "pages_in", "back_fork", "pages_lost"), 0)},
            "1.50 GiB of 4.00 GiB in use, by 2 processes",
        ),
        (
            {
                "counts": {
                    "pages_out": 1 << 19,
                    "pages_in": 1 << 18,
                    "room_waits": 1,
                    "pauses": 1,
                    "pages_lost": 3,
                    "back_fork": 256,
                    "back_locked": 0,
                    "back_pinned": 512,
                }
            },
            "1.50 GiB of 4.00 GiB in use, by 2 processes; 2.00 GiB out, 1.00 GiB in; "
            "1 wait for room; 1 pause for touches at random; 1.00 MiB handed back (fork); "
            "2.00 MiB handed back (pinned); 3 pages lost",
        ),
    ],
)
def test_far_memory_is_one_line(changes: dict[str, Any], text: str) -> None:
    far = FarRow(bytes=4 * GIB, used_bytes=3 * GIB // 2, jobs=1, processes=2)
    assert row("far memory", far=msgspec.structs.replace(far, **changes)) == text


def test_a_device_without_far_memory_has_no_line_for_it() -> None:
    stats: dict[str, int] = defaultdict(int)
    names = [name for name, _ in describe(device_status(stats=stats))]
    assert "far memory" not in names
