# SPDX-License-Identifier: Apache-2.0
"""`infiniswap top`: what is made of two looks, what is told of changes, and what a window holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from support.donors.hostile_donor import EVIL, lease, status

from infiniswap import config as configuration
from infiniswap.cli.main import main
from infiniswap.cli.top.loop import Viewer, pressed, split
from infiniswap.cli.top.sections import Column, Section, share_out
from infiniswap.cli.top.view import COLUMNS_MIN, LINES_MIN, Seen, Window, bar, draw
from infiniswap.control import messages as m
from infiniswap.errors import ConfigError
from infiniswap.units import GIB, MIB, PAGE_BYTES, HostPort
from infiniswap.watch.asking import AskedDonor
from infiniswap.watch.changes import BAD, GOOD, Change, between
from infiniswap.watch.picture import Picture, look

A = HostPort("10.0.0.1", 9400)
B = HostPort("10.0.0.2", 9400)
WINDOW = Window(80, 24, clock="12:00:00")


def donor(address: HostPort = A, **changes: Any) -> AskedDonor:
    return AskedDonor(address, msgspec.convert(status(**changes), m.Status), "")


def silent(address: HostPort = A) -> AskedDonor:
    return AskedDonor(address, None, "no route to host")


def device(**changes: Any) -> dict[str, Any]:
    row = {
        "name": "swap0",
        "state": "serving",
        "size_bytes": 4 * GIB,
        "swap_used_bytes": GIB,
        "on_donors_bytes": GIB // 2,
        "in_donors_bytes": 0,
        "in_disk_bytes": 0,
        "out_bytes": 0,
        "page_in_us_p50": 48.2,
        "page_in_us_p99": 310.0,
        "errors": 0,
        "alarms": "",
    }
    return {**row, **changes}


def looked(*looks: tuple[Sequence[AskedDonor], Sequence[dict[str, Any]]]) -> list[Picture]:
    """The pictures of these looks, two seconds apart."""
    pictures: list[Picture] = []
    for number, (donors, devices) in enumerate(looks):
        before = pictures[-1] if pictures else None
        pictures.append(look(before, donors, devices, (), 100.0 + 2.0 * number))
    return pictures


def lines(picture: Picture | None, window: Window = WINDOW, told: Sequence[Seen] = ()) -> list[str]:
    return [line.plain for line in draw(picture, told, window)]


def row_of(shown: Sequence[str], word: str) -> str:
    return next(line for line in shown if line.startswith(word))


# ------------------------------------------------------------------------------ looks


def test_rates_are_differences_between_looks() -> None:
    moved = lease(read_bytes=0, write_bytes=0)
    more = lease(read_bytes=600 * PAGE_BYTES, write_bytes=400 * PAGE_BYTES)
    first, second = looked(
        ([donor(leases=[moved])], [device()]),
        (
            [donor(leases=[more])],
            [
                device(
                    in_donors_bytes=300 * PAGE_BYTES,
                    in_disk_bytes=100 * PAGE_BYTES,
                    out_bytes=50 * PAGE_BYTES,
                )
            ],
        ),
    )
    assert first.heard[str(A)].pages_per_s is None
    assert first.rates["swap0"] is None
    assert second.heard[str(A)].pages_per_s == 500.0
    rates = second.rates["swap0"]
    assert rates is not None
    assert (rates.in_per_s, rates.out_per_s, rates.disk_share) == (200.0, 25.0, 0.25)


def test_a_device_that_began_again_has_no_rate_of_both_lives() -> None:
    _, again, stopped = looked(
        ([], [device(out_bytes=10**9)]),
        ([], [device(out_bytes=5)]),
        ([], [{"name": "swap0", "state": "stopped"}]),
    )
    assert again.rates["swap0"] is None
    assert stopped.rates["swap0"] is None


def test_a_donor_that_falls_silent_keeps_its_figures_and_shows_their_age() -> None:
    pictures = looked(([donor()], []), *[([silent()], [])] * 4)
    assert "unreachable" in row_of(lines(pictures[1]), "donor ")
    old = row_of(lines(pictures[-1], Window(100, 24)), "donor ")
    assert "unreachable, 8 s old" in old
    assert "64.0 GiB" in old


# --------------------------------------------------------------------------- changes


def told_of(*looks: tuple[Sequence[AskedDonor], Sequence[dict[str, Any]]]) -> list[Change]:
    first, second = looked(*looks)
    return between(first, second)


def test_what_happens_to_donors_is_told() -> None:
    assert told_of(([donor()], []), ([silent()], [])) == [
        Change("donor: unreachable: no route to host", BAD)
    ]
    assert told_of(([silent()], []), ([donor()], [])) == [Change("donor: serving again", GOOD)]
    assert told_of(([donor()], []), ([donor(incarnation="1" * 32)], [])) == [
        Change("donor: its daemon has started again")
    ]
    assert told_of(([donor()], []), ([donor(draining=True)], [])) == [Change("donor: drained")]
    counters = {"evictions": 3, "evictions_forced": 1}
    assert told_of(([donor()], []), ([donor(counters=counters)], [])) == [
        Change("donor: took back 3 slabs from its consumers", BAD),
        Change("donor: took 1 slab back at once, without moving them first", BAD),
    ]
    assert told_of(([donor()], []), ([donor(), donor(B, donor_name="new")], [])) == [
        Change("new: serving")
    ]
    assert told_of(([donor()], []), ([], [])) == [Change("donor: no longer announced", BAD)]


def test_leases_that_come_and_go_are_told_by_job() -> None:
    held = lease(job="sort", host_name="laptop", slots_mapped=2)
    assert told_of(([donor()], []), ([donor(leases=[held])], [])) == [
        Change("donor: sort on laptop got a lease")
    ]
    assert told_of(([donor(leases=[held])], []), ([donor()], [])) == [
        Change("donor: sort on laptop gave up 2.00 GiB")
    ]
    # Of a donor that leaves leases out, nobody knows whether they went.
    cut = donor(leases_left_out=5)
    assert told_of(([donor(leases=[held])], []), ([cut], [])) == []


def test_what_happens_to_devices_is_told() -> None:
    alarm = "lost pages"
    assert told_of(([], [device()]), ([], [device(alarms=alarm, errors=2)])) == [
        Change("device swap0: lost pages", BAD),
        Change("device swap0: 2 more errors", BAD),
    ]
    assert told_of(([], [device(alarms=alarm)]), ([], [device()])) == [
        Change("device swap0: no alarm is left", GOOD)
    ]
    assert told_of(([], [device()]), ([], [])) == [Change("device swap0: gone")]
    assert told_of(([], []), ([], [device()])) == [Change("device swap0: serving")]
    assert told_of(([], [device()]), ([], [{"name": "swap0", "state": "stopped"}])) == [
        Change("device swap0: stopped")
    ]


def test_nothing_new_tells_nothing() -> None:
    same = ([donor(leases=[lease()])], [device()])
    assert told_of(same, same) == []


# ------------------------------------------------------------------------------ view


def test_a_bar_is_as_long_as_the_memory() -> None:
    def of(**memory: Any) -> str:
        fields = {f"memory__{key}": value for key, value in memory.items()}
        return bar(msgspec.convert(status(pool__slabs_mapped=8, **fields), m.Status))

    # 64 GiB in 16 characters: 20 used, 8 lent, 4 in the pool, 32 available, of these 8 cache in use
    # and 8 headroom.
    assert of(cache_bytes=8 * GIB) == "#####cc==.....--"
    assert of(available_bytes=4 * GIB) == "############==.-"
    assert of(available_bytes=0) == "#############==."
    assert of(headroom_bytes=64 * GIB, available_bytes=32 * GIB) == "#####==.--------"
    assert of(cache_bytes=64 * GIB, available_bytes=4 * GIB) == "############c==."


@given(
    total=st.integers(0, 2**45),
    parts=st.tuples(*[st.integers(0, 2**46)] * 4),
)
def test_a_bar_never_grows(total: int, parts: tuple[int, int, int, int]) -> None:
    available, headroom, cache, mapped = parts
    found = msgspec.convert(
        status(
            memory__total_bytes=total,
            memory__available_bytes=available,
            memory__headroom_bytes=headroom,
            memory__cache_bytes=cache,
            pool__slabs_mapped=mapped % 1000,
        ),
        m.Status,
    )
    assert len(bar(found)) == 16


def test_eighty_by_twenty_four_shows_all_that_matters() -> None:
    used = lease(job="prep.py", user="ada", host_name="laptop", slots_mapped=2, pages_per_s=71.6)
    first, second = looked(
        ([donor(leases=[used], pool__slabs_mapped=2), silent(B)], [device()]),
        ([donor(leases=[used], pool__slabs_mapped=2), silent(B)], [device(in_disk_bytes=8 * MIB)]),
    )
    told = [Seen("11:59:58", event) for event in between(first, second)]
    told.append(Seen("12:00:00", Change("donor: took back 3 slabs from its consumers", BAD)))
    shown = lines(second, told=told)
    assert len(shown) == 24
    assert max(map(len, shown)) <= 80
    assert "1 of 2 donors answer" in shown[0]
    assert "[########........--]" not in shown[2]
    text = "\n".join(shown)
    for word in (
        "serving",
        "unreachable",
        "2.00 GiB",
        "prep.py",
        "ada",
        "72",
        "1024",
        "100%",
        "48",
    ):
        assert word in text, word
    assert "! donor: took back 3 slabs" in text
    assert shown[-1].endswith("q quit")


@given(
    columns=st.integers(1, 200),
    height=st.integers(1, 60),
    donors=st.integers(0, 40),
    leases=st.integers(0, 40),
    focus=st.integers(0, 4),
    first=st.integers(0, 100),
)
def test_no_window_is_overrun(
    columns: int, height: int, donors: int, leases: int, focus: int, first: int
) -> None:
    held = [lease(lease=i, host_name="h" * (i % 60 + 1), job="j" * i) for i in range(leases)]
    asked = [
        donor(
            HostPort(f"10.0.0.{i}", 9400), donor_name="d" * (i + 1), leases=held if i == 0 else []
        )
        for i in range(donors)
    ]
    picture = look(None, asked, [device(), device(name="x" * 70)], ("broker " * 30,), 1.0)
    told = [Seen("12:00:00", Change("happened " * 40))] * 30
    window = Window(columns, height, focus, first, clock="12:00:00")
    shown = draw(picture, told, window)
    assert len(shown) <= height
    if columns >= COLUMNS_MIN and height >= LINES_MIN:
        assert len(shown) == height
        # Only sentences at the end may be longer; the terminal cuts them.
        assert all(cell_len(line.plain) <= columns or line.no_wrap for line in shown)


def test_far_memory_has_a_column_where_a_device_has_some() -> None:
    window = Window(140, 24)
    (without,) = looked(([donor()], [device()]))
    assert " FAR " not in row_of(lines(without, window), "DEVICE")
    (having,) = looked(([donor()], [device(), device(name="swap1", far_used_bytes=3 * GIB)]))
    shown = lines(having, window)
    assert " FAR " in row_of(shown, "DEVICE")
    assert "3.00 GiB" in row_of(shown, "swap1")


def test_a_window_that_is_too_small_says_so() -> None:
    (picture,) = looked(([donor()], []))
    assert " ".join(lines(picture, Window(30, 8))) == (
        "This window has 30 x 8 characters; infiniswap top needs 60 x 13. Make it larger, or press "
        "q."
    )


def test_before_the_first_look_it_says_what_it_does() -> None:
    assert "asking" in lines(None)[0]


def test_one_section_in_full_scrolls() -> None:
    held = [lease(lease=i, host_name=f"host{i:02}", slots_mapped=50 - i) for i in range(50)]
    (picture,) = looked(([donor(leases=held)], []))
    top = lines(picture, Window(80, 24, focus=3))
    assert row_of(top, "host00")
    assert any(line.startswith("  and 3") for line in top)
    last = lines(picture, Window(80, 24, focus=3, first=1000))
    assert row_of(last, "host49")
    assert not any(line.startswith("host00") for line in last)


def test_what_others_say_moves_no_cursor() -> None:
    held = msgspec.structs.replace(
        msgspec.convert(lease(), m.LeaseStatus),
        job=EVIL, user=EVIL, host_name=EVIL, tenant=EVIL, device_name=EVIL,
    )  # fmt: skip
    heard = AskedDonor(
        A,
        msgspec.structs.replace(
            msgspec.convert(status(leases=[]), m.Status),
            donor_name=EVIL,
            leases=[held],
        ),
        "",
    )
    (picture,) = looked(([heard], [device(alarms=EVIL)]))
    told = [Seen("12:00:00", Change(EVIL, BAD))]
    for line in lines(picture, Window(200, 40), told):
        assert line == "" or line.isprintable()


def test_sections_share_a_window() -> None:
    assert share_out([3, 3, 3, 3], 20) == [3, 3, 3, 3]
    assert share_out([100, 3, 2, 50], 20) == [8, 3, 2, 7]
    assert share_out([100, 100, 100, 100], 8) == [2, 2, 2, 2]


def test_columns_of_less_worth_go_first() -> None:
    section = Section(
        "things",
        [Column("NAME", ["one"]), Column("DEAR", ["x" * 10], 5), Column("CHEAP", ["y" * 10], 1)],
        [""],
        "none",
    )
    assert [line.plain for line in section.lines(40, 2)] == [
        "NAME  DEAR        CHEAP",
        "one   xxxxxxxxxx  yyyyyyyyyy",
    ]
    assert [line.plain for line in section.lines(20, 2)] == ["NAME  DEAR", "one   xxxxxxxxxx"]


# ------------------------------------------------------------------------------ keys


async def test_a_list_of_peers_that_is_being_edited_does_not_end_the_view(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    peers.write_text("127.0.0.1:1\n")
    path = tmp_path / "infiniswap.toml"
    path.write_text(f'[cluster]\npeers_file = "{peers}"\n')
    viewer = Viewer(configuration.load(path, environ={}), Console())
    found = await viewer._find(None)
    assert found.addresses == (HostPort("127.0.0.1", 1),)
    peers.write_text("no address!\n")
    later = await viewer._find(found)
    assert later.addresses == found.addresses
    assert "line 1 is not an address" in str(later.failure)
    with pytest.raises(ConfigError):
        await viewer._find(None)


def test_keys() -> None:
    assert pressed(WINDOW, b"q") is None
    paused = pressed(WINDOW, b"p")
    assert paused is not None
    assert paused.is_paused
    assert pressed(paused, b" ") == WINDOW
    focused = pressed(WINDOW, b"3")
    assert focused is not None
    assert focused.focus == 3
    assert pressed(WINDOW, b"9") == WINDOW
    down = pressed(focused, b"\x1b[6~")
    assert down is not None
    assert down.first == 10
    up = pressed(down, b"\x1b[A")
    assert up is not None
    assert (up.first, pressed(up, b"0")) == (9, WINDOW)
    assert pressed(WINDOW, b"\x1b") == WINDOW


def test_what_is_typed_at_once_is_taken_apart() -> None:
    assert list(split(b"1\x1b[Bp\x1b[5~q")) == [b"1", b"\x1b[B", b"p", b"\x1b[5~", b"q"]
    assert list(split(b"")) == [b"q"]


def test_without_a_terminal_it_says_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 5
    assert "infiniswap status" in capsys.readouterr().err
