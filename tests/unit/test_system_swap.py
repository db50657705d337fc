# SPDX-License-Identifier: Apache-2.0
"""Swap areas: the kernel's table, priorities, and whether swapoff fits in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.errors import ConflictError, UsageError
from infiniswap.system import swap
from infiniswap.system.memory import CgroupMemory, Memory
from infiniswap.units import GIB, MIB

HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


def _area(path: str, priority: int, used: int = 0) -> swap.SwapArea:
    return swap.SwapArea(path, "partition", GIB, used, priority)


def test_a_table_of_the_kernel() -> None:
    text = (
        HEADER + "/dev/vda2                               partition\t2097148\t\t1024\t\t-2\n"
        "/swap\\040file\\134x                        file\t\t1024\t\t0\t\t5\n"
        "/old\\040(deleted)                          file\t\t8\t\t8\t\t32767\n"
    )
    partition, file, deleted = swap.parse_swaps(text)
    assert partition == swap.SwapArea("/dev/vda2", "partition", 2097148 * 1024, MIB, -2)
    assert file.path == "/swap file\\x"
    assert not file.deleted
    assert (deleted.path, deleted.deleted, deleted.priority) == ("/old", True, 32767)
    assert swap.parse_swaps(HEADER) == ()


PATHS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(lambda path: not path.endswith(" (deleted)"))


@given(st.lists(st.tuples(PATHS, st.integers(0, 2**40), st.integers(-(2**15), 2**15 - 1))))
def test_every_area_comes_back(areas: list[tuple[str, int, int]]) -> None:
    def escape(path: str) -> str:
        return "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in path)

    text = HEADER + "".join(
        f"/{escape(path)} file {size} 0 {priority}\n" for path, size, priority in areas
    )
    got = [(area.path, area.size_bytes, area.priority) for area in swap.parse_swaps(text)]
    assert got == [("/" + path, size * 1024, priority) for path, size, priority in areas]


@given(st.text())
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    swap.parse_swaps(text)


def test_an_area_is_found_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "a b", tmp_path / "link"
    target.write_bytes(b"")
    link.symlink_to(target)
    name = str(target).replace(" ", "\\040")
    (tmp_path / "swaps").write_text(f"{HEADER}{name} file 8 4 3\n")
    area = swap.find_area(link, proc=tmp_path)
    assert area is not None
    assert swap.used_bytes(link, proc=tmp_path) == 4096
    assert swap.find_area(tmp_path / "other", proc=tmp_path) is None
    assert swap.used_bytes(tmp_path / "other", proc=tmp_path) == 0


@given(st.lists(st.integers(-(2**15), swap.PRIORITY_MAX - 1)))
def test_our_priority_is_above_every_other(priorities: list[int]) -> None:
    ours = swap.priority_above([_area(f"/{n}", p) for n, p in enumerate(priorities)])
    assert all(priority < ours for priority in priorities)
    assert 0 <= ours <= swap.PRIORITY_MAX


def test_our_own_area_does_not_count() -> None:
    areas = [_area("/ours", swap.PRIORITY_MAX), _area("/other", 7)]
    assert swap.priority_above(areas, path=Path("/ours")) == swap.PRIORITY_DEFAULT


def test_the_highest_priority_being_taken_is_an_error_that_names_it() -> None:
    with pytest.raises(ConflictError, match=r"/dev/zram0.*swapoff /dev/zram0"):
        swap.priority_above([_area("/dev/zram0", swap.PRIORITY_MAX)])


def test_a_second_swapon_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "swaps").write_text(f"{HEADER}/dev/loop9 partition 8 4 3\n")
    with pytest.raises(ConflictError, match=r"/dev/loop9.*already"):
        swap.swapon(Path("/dev/loop9"), priority=5, discard=True, proc=tmp_path)


def test_wrong_priorities_and_labels() -> None:
    for priority in (-1, swap.PRIORITY_MAX + 1):
        with pytest.raises(UsageError):
            swap.swapon(Path("/absent"), priority=priority, discard=False)
    for label in ("", "x" * (swap.LABEL_CHARS_MAX + 1)):
        with pytest.raises(UsageError):
            swap.mkswap(Path("/absent"), label=label)


def test_swapoff_of_what_is_not_active_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "swaps").write_text(HEADER)
    swap.swapoff(Path("/absent"), timeout_s=1, proc=tmp_path)


def _cgroup(limit: int | None, usage: int, swapped: int | None, file: int = 0) -> CgroupMemory:
    return CgroupMemory(limit, usage, None, usage - file, file, swapped, 0)


ROOMY = Memory(16 * GIB, 8 * GIB, "host")
FULL = _cgroup(2 * GIB, 2 * GIB, GIB)


@pytest.mark.parametrize(
    ("used_bytes", "host", "cgroup", "elsewhere_bytes", "why_not"),
    [
        (GIB, ROOMY, _cgroup(2 * GIB, GIB, GIB), 0, ""),
        (GIB, ROOMY, _cgroup(None, GIB, 9 * GIB), 0, ""),
        (0, Memory(GIB, 0, "host"), None, 0, ""),
        (8 * GIB, ROOMY, None, 0, "8.00 GiB"),
        (GIB, ROOMY, FULL, 0, "/job"),
        (GIB, ROOMY, _cgroup(2 * GIB, 2 * GIB, GIB, file=GIB), 0, ""),  # file cache can go
        # It has 4 GiB swapped out, but this area holds 1 GiB in all.
        (GIB, ROOMY, _cgroup(6 * GIB, 4 * GIB, 4 * GIB), 0, ""),
        # Room in other swap areas makes a full cgroup no obstacle, if there is some to spare.
        (GIB, ROOMY, FULL, GIB // 2, "/job"),
        (GIB, ROOMY, FULL, GIB, "/job"),
        (GIB, ROOMY, FULL, 2 * GIB, ""),
    ],
)
def test_swapoff_fits_where_host_and_cgroup_have_room(
    used_bytes: int, host: Memory, cgroup: CgroupMemory | None, elsewhere_bytes: int, why_not: str
) -> None:
    cgroups = [] if cgroup is None else [("/job", cgroup)]
    fit = swap.judge_swapoff(used_bytes, host, cgroups, elsewhere_bytes)
    assert fit.fits is not bool(why_not)
    assert why_not in fit.reason


def test_an_inactive_area_always_fits(tmp_path: Path) -> None:
    (tmp_path / "swaps").write_text(HEADER)
    assert swap.swapoff_fits(Path("/absent"), proc=tmp_path).fits


def pretend(
    monkeypatch: pytest.MonkeyPatch, areas: Callable[[], list[swap.SwapArea]], swapped: int
) -> None:
    """These areas, and one job, which is at its limit."""
    job = CgroupMemory(16 * MIB, 16 * MIB, None, 16 * MIB, 0, swapped, None)
    monkeypatch.setattr(swap, "active_areas", lambda *, proc: areas())
    monkeypatch.setattr(swap, "machine_memory", lambda *, proc: Memory(GIB, GIB, "host"))
    monkeypatch.setattr(swap, "_limited_cgroups", lambda proc: [("/job", job)])


def test_an_area_that_is_being_used_is_not_taken_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its figures change between two looks; its own free space is no room for its pages."""
    used = iter(range(40 * MIB, 80 * MIB, MIB))

    def areas() -> list[swap.SwapArea]:
        return [swap.SwapArea("/dev/loop9", "partition", 192 * MIB, next(used), 5)]

    pretend(monkeypatch, areas, 40 * MIB)
    fit = swap.swapoff_fits(Path("/dev/loop9"))
    assert not fit.fits
    assert "/job" in fit.reason


def test_room_in_an_area_that_is_being_removed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two areas that are removed at the same time would count on each other's."""
    going, other, third = (tmp_path / name for name in ("going", "other", "third"))
    for path in (going, other, third):
        path.touch()
    used_bytes = {going: GIB // 2, other: 0, third: GIB}
    areas = [swap.SwapArea(str(path), "file", GIB, used, 5) for path, used in used_bytes.items()]
    pretend(monkeypatch, lambda: areas, GIB)
    with swap.leaving(going):
        assert swap.swapoff_fits(going).fits
        with swap.leaving(other):
            assert not swap.swapoff_fits(going).fits
        assert swap.swapoff_fits(going).fits


@pytest.mark.parametrize(
    ("total_kib", "leaving"),
    [
        (3 << 20, None),
        ((2 << 20) + 4096, "/dev/b"),  # what is left there still counts
        ((2 << 20) + 512, "/dev/a"),
        (2 << 20, "/dev/c"),
    ],
)
def test_an_area_that_somebody_is_taking_off_is_known(
    tmp_path: Path, total_kib: int, leaving: str | None
) -> None:
    used_kib = {"/dev/a": 512, "/dev/b": 4096, "/dev/c": 0}
    lines = [f"{path} partition {1 << 20} {used} 5\n" for path, used in used_kib.items()]
    (tmp_path / "swaps").write_text(HEADER + "".join(lines))
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nSwapTotal: {total_kib} kB\n")
    found = swap.being_taken_off(proc=tmp_path)
    assert (found.path if found else None) == leaving
