# SPDX-License-Identifier: Apache-2.0
"""The demo's judgement, its table and its JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from infiniswap.demo import results
from infiniswap.demo.donors import Served
from infiniswap.demo.results import DISK, FAR, INFINISWAP, UNLIMITED, Leg, Results
from infiniswap.units import GIB, MIB

OUTPUT = {"lines": "aa", "totals": "bb"}


def leg(name: str, **changes: Any) -> Leg:
    limited = name != UNLIMITED
    made = Leg(
        name=name,
        title=f"the {name} one",
        elapsed_s=20.0 if not limited else 30.0,
        limit_bytes=640 * MIB if limited else None,
        anon_peak_bytes=1280 * MIB,
        page_in_bytes=800 * MIB if limited else 0,
        page_out_bytes=900 * MIB if limited else 0,
        output=OUTPUT,
        far_out_bytes=880 * MIB if name == FAR else 0,
        page_in_us_p50=49.0 if name == INFINISWAP else None,
        page_in_us_p99=3408.0 if name == INFINISWAP else None,
        page_in_us_mean=424.4 if name == DISK else None,
    )
    return replace(made, **changes)


def demo(**changes: Any) -> Results:
    made = Results(
        scale="1",
        legs=(leg(UNLIMITED), leg(INFINISWAP), leg(FAR), leg(DISK)),
        donors=(Served("donor-1", 400 * MIB, 500 * MIB), Served("donor-2", 380 * MIB, 420 * MIB)),
        throttle="",
        disk_reads_per_s=3000.0,
        disk_writes_per_s=3001.0,
        total_s=150.0,
    )
    return replace(made, **changes)


def with_leg(changed: Leg) -> Results:
    base = demo()
    return replace(
        base, legs=tuple(changed if old.name == changed.name else old for old in base.legs)
    )


def test_pages_read_ahead_in_vain_are_no_page_ins() -> None:
    busy = (Served("donor-1", 900 * MIB, 500 * MIB),)
    own = leg(INFINISWAP, page_in_staging_bytes=16 * MIB, page_in_disk_bytes=8 * MIB)
    assert demo(donors=busy).donors_share == 1.0
    assert replace(with_leg(own), donors=busy).donors_share == pytest.approx(0.97)


def test_a_demo_at_or_above_its_floors_passes() -> None:
    assert results.failures(demo()) == []
    at_floor = demo(
        legs=(
            leg(UNLIMITED, anon_peak_bytes=768 * MIB),
            leg(INFINISWAP, page_in_bytes=GIB // 4, page_out_bytes=GIB // 4),
            leg(FAR),
            leg(DISK),
        ),
        donors=(Served("donor-1", GIB // 5, 0), Served("donor-2", 1, 0)),
    )
    assert results.failures(at_floor) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (leg(INFINISWAP, page_in_disk_bytes=24 * MIB), ""),
        (leg(INFINISWAP, page_in_disk_bytes=25 * MIB), "3.1% of the page-in bytes came from the"),
        (leg(INFINISWAP, page_in_disk_bytes=200 * MIB, page_in_chosen_bytes=176 * MIB), ""),
        (leg(INFINISWAP, page_in_disk_bytes=200 * MIB, page_in_chosen_bytes=175 * MIB), "3.1% of"),
        (leg(UNLIMITED, anon_peak_bytes=768 * MIB - 1), "the job's anonymous memory peaked at"),
        (leg(INFINISWAP, page_in_bytes=0), "only 0 B were paged in with infiniswap"),
        (leg(INFINISWAP, page_out_bytes=255 * MIB), "only 255 MiB were paged out with"),
        (leg(DISK, page_in_bytes=0, page_out_bytes=0), ""),
        (leg(FAR, far_out_bytes=GIB // 4), ""),
        (leg(FAR, far_out_bytes=255 * MIB), "only 255 MiB left as far memory, not 256 MiB"),
        (leg(FAR, output={**OUTPUT, "totals": "cc"}), "the output of the far job differs: totals"),
        (leg(INFINISWAP, output={**OUTPUT, "totals": "cc"}), "infiniswap job differs: totals"),
        (
            leg(DISK, output={**OUTPUT, "totals": "cc"}),
            "the output of the disk job differs: totals",
        ),
        (leg(INFINISWAP, output={"lines": "aa"}), "the infiniswap job differs: totals"),
        (leg(INFINISWAP, output={**OUTPUT, "more": "dd"}), "the infiniswap job differs: more"),
    ],
)
def test_each_result_beyond_its_bound_fails_once(changed: Leg, told: str) -> None:
    failed = results.failures(with_leg(changed))
    assert len(failed) == bool(told)
    assert told in "".join(failed)


def test_too_little_paged_in_or_from_donors_fails() -> None:
    small = with_leg(leg(INFINISWAP, page_in_bytes=255 * MIB))
    (failed,) = results.failures(replace(small, donors=(Served("donor-1", 255 * MIB, 0),)))
    assert "paged in with infiniswap" in failed
    (failed,) = results.failures(demo(donors=(Served("donor-1", 639 * MIB, 0),)))
    assert "79.9%" in failed


def test_donors_need_not_serve_what_the_disk_had_sooner_but_half_in_any_case() -> None:
    def served(donors: int, chosen: int) -> list[str]:
        own = leg(INFINISWAP, page_in_disk_bytes=chosen, page_in_chosen_bytes=chosen)
        return results.failures(replace(with_leg(own), donors=(Served("donor-1", donors, 0),)))

    assert served(481 * MIB, 160 * MIB) == []
    (failed,) = served(479 * MIB, 160 * MIB)
    assert "59.9%" in failed
    assert served(400 * MIB, 400 * MIB) == []
    (failed,) = served(399 * MIB, 401 * MIB)
    assert "not 50%" in failed


def test_what_did_not_come_from_donors_is_told() -> None:
    told = with_leg(leg(INFINISWAP, page_in_staging_bytes=16 * MIB, page_in_disk_bytes=8 * MIB))
    assert results.remarks(told)[0] == (
        "With infiniswap 16.0 MiB were paged in again before they had left this host, and "
        "8.00 MiB came from its disk."
    )
    assert results.as_json(told, [])["disk_share"] == pytest.approx(0.01)
    sooner = leg(INFINISWAP, page_in_disk_bytes=8 * MIB, page_in_chosen_bytes=2 * MIB)
    remark = results.remarks(with_leg(sooner))[0]
    assert remark.endswith("came from its disk (2.00 MiB because it was the quicker source).")


def test_jobs_that_write_nothing_fail_though_all_are_equal() -> None:
    legs = tuple(replace(one, output={}) for one in demo().legs)
    assert results.failures(demo(legs=legs)) == ["the jobs wrote nothing"]


def test_the_table_has_every_figure() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(results.table(demo()))
    rows = {line.split("  ")[0].strip(): line for line in out.getvalue().splitlines()}
    for name, figures in (
        (UNLIMITED, "no limit|1.00 x"),
        (INFINISWAP, "30.0 s|1.50 x|1.25 GiB|900 MiB|800 MiB|97.5%|p50 49 µs, p99 3.41 ms"),
        (FAR, "30.0 s|1.50 x|1.25 GiB|900 MiB|800 MiB"),
        (DISK, "mean 424 µs"),
    ):
        for figure in figures.split("|"):
            assert figure in rows[f"the {name} one"]
    assert "%" not in rows["the disk one"]


def test_what_a_reader_must_know_is_said() -> None:
    assert results.remarks(demo()) == [
        "With far memory 97.8% of what left went in blocks of 2 MiB, the rest as swap. Its backup "
        "was on this machine's disk as fast as it is."
    ]
    assert "no limits" in results.remarks(demo(throttle="no limits here"))[0]
    elsewhere = with_leg(leg(INFINISWAP, other_swap_bytes=5 * MIB))
    assert "5.00 MiB" in results.remarks(elsewhere)[0]


def test_a_host_without_far_memory_has_no_such_leg_and_says_why() -> None:
    legs = tuple(one for one in demo().legs if one.name != FAR)
    found = demo(legs=legs, no_far="Linux 6.1 cannot move pages. Use Linux 7.0.")
    assert results.failures(found) == []
    assert results.remarks(found) == [
        "There was no job with far memory: Linux 6.1 cannot move pages. Use Linux 7.0."
    ]
    assert results.as_json(found, [])["no_far"].startswith("Linux 6.1")


def test_json_holds_all_and_the_judgement() -> None:
    data = json.loads(json.dumps(results.as_json(demo(), ["bad"])))
    assert data["ok"] is False
    assert data["failures"] == ["bad"]
    assert data["donors_share"] == pytest.approx(0.975)
    assert [entry["name"] for entry in data["legs"]] == [UNLIMITED, INFINISWAP, FAR, DISK]
    assert data["legs"][1]["page_out_bytes"] == 900 * MIB
    donor = {"name": "donor-1", "read_bytes": 400 * MIB, "write_bytes": 500 * MIB}
    assert data["donors"][0] == donor
    assert data["floors"]["donors_share"] == 0.8
    assert results.as_json(demo(), [])["ok"] is True


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0.4, "0 µs"), (49.2, "49 µs"), (999.4, "999 µs"), (999.6, "1 ms"), (3408.0, "3.41 ms")],
)
def test_times_for_people(time_us: float, text: str) -> None:
    assert results.format_us(time_us) == text
