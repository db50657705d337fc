# SPDX-License-Identifier: Apache-2.0
"""What `run` measures and says, on made-up cgroups and swap areas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.device_status import device_status, donor_row

from infiniswap.cli.run.live_line import fit, say
from infiniswap.device.api import DeviceStatus, DonorRow, SuccessionRow
from infiniswap.device.jobs import closing, compressed, other_areas, usage
from infiniswap.device.jobs import summary as summaries
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.compressed import ZswapUse
from infiniswap.device.jobs.cost import Cost
from infiniswap.device.jobs.job import JobResult
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.swap import SwapArea
from infiniswap.units import GIB, MIB

OURS = "/dev/ours"
LOCAL = 64 * MIB


class Host:
    """A version 1 cgroup in a directory, and a list of areas."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.areas = [SwapArea(OURS, "partition", 256 * MIB, 0, 100)]
        self.leaving: SwapArea | None = None
        self.set()

    def set(self, anon: int = 0, swapped: int = 0, both_peak: int = 0, oom_kills: int = 0) -> None:
        files = {
            "memory.stat": f"total_rss {anon}\ntotal_swap {swapped}\n",
            "memory.oom_control": f"oom_kill {oom_kills}\n",
            "memory.limit_in_bytes": f"{LOCAL}\n",
            "memory.usage_in_bytes": f"{anon}\n",
            "memory.max_usage_in_bytes": f"{anon}\n",
            "memory.memsw.max_usage_in_bytes": f"{both_peak}\n",
        }
        for name, text in files.items():
            (self.path / name).write_text(text)

    def use(self, path: str, used: int) -> None:
        self.areas = [
            dataclasses.replace(area, used_bytes=used) if area.path == path else area
            for area in self.areas
        ]

    def sampler(self) -> usage.Sampler:
        return usage.Sampler(
            MemoryCgroup(self.path, 1), OURS, lambda: self.areas, lambda: self.leaving
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_peaks_are_the_highest_of_all_samples(host: Host) -> None:
    sampler = host.sampler()
    for anon, swapped in ((10, 0), (60, 30), (50, 45), (0, 0)):
        host.set(anon * MIB, swapped * MIB)
        sampler.sample()
    assert sampler.peaks.anon == 95 * MIB
    assert sampler.peaks.swap == 45 * MIB
    assert sampler.peaks.local == 60 * MIB
    assert not sampler.was_swap_full()


def test_a_cgroup_that_has_gone_keeps_the_last_figures(host: Host) -> None:
    sampler = host.sampler()
    host.set(10 * MIB)
    sampler.sample()
    (host.path / "memory.stat").unlink()
    sampler.sample()
    assert sampler.peaks.anon == 10 * MIB


@pytest.mark.parametrize(("used", "both_peak"), [(255 * MIB, 0), (0, LOCAL + 250 * MIB)])
def test_full_swap_is_seen_in_a_sample_or_else_in_the_kernels_mark(
    host: Host, used: int, both_peak: int
) -> None:
    sampler = host.sampler()
    host.use(OURS, used)
    host.set(both_peak=both_peak)
    sampler.sample()
    host.use(OURS, 0)
    sampler.sample()
    assert sampler.was_swap_full()


def test_swap_is_not_full_while_another_area_has_room(host: Host) -> None:
    host.areas.append(SwapArea("/dev/other", "partition", GIB, 0, 5))
    sampler = host.sampler()
    host.use(OURS, 256 * MIB)
    host.set(both_peak=LOCAL + 256 * MIB)
    sampler.sample()
    assert not sampler.was_swap_full()


def test_version_2_counts_pages_that_found_no_swap(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 4096\n")
    (tmp_path / "memory.swap.events").write_text("high 0\nmax 0\nfail 3\n")
    (tmp_path / "memory.swap.peak").write_text("8192\n")
    area = SwapArea(OURS, "partition", GIB, 0, 100)
    sampler = usage.Sampler(MemoryCgroup(tmp_path, 2), OURS, lambda: [area], lambda: None)
    sampler.sample()
    assert sampler.peaks.swap_failures == 3
    assert sampler.peaks.swap == 8192
    assert sampler.was_swap_full()


def test_what_went_elsewhere_is_never_more_than_the_job_has_swapped_out(host: Host) -> None:
    host.areas.append(SwapArea("/dev/other", "partition", GIB, 7 * MIB, 5))
    sampler = host.sampler()
    host.use("/dev/other", 107 * MIB)  # 100 MiB more, of all the host's programs
    host.set(swapped=40 * MIB)
    sampler.sample()
    assert sampler.peaks.others == 40 * MIB
    host.set(swapped=200 * MIB)
    for used_mib in (27, 0):
        host.use("/dev/other", used_mib * MIB)
        sampler.sample()
        assert sampler.peaks.others == 40 * MIB


# ------------------------------------------------------------------------- summary


def status(
    donors: Sequence[DonorRow] = (), take_overs: int = 0, backup: str | None = "/b", /, **stats: int
) -> DeviceStatus:
    names = ("pages_in", "pages_out", "pages_in_remote", "pages_in_staging", "pages_in_backup")
    return device_status(
        pid=1 + take_overs,
        backup=backup,
        donors=list(donors),
        stats=dict.fromkeys(names, 10) | stats,
        page_in_us_p50=100.4,
        page_in_us_p99=2000.0,
        succession=SuccessionRow(
            holder_pid=1, standby="ready", take_overs=take_overs, reason="", pause_ms=0.0
        ),
    )


def summary(
    host: Host,
    after: DeviceStatus,
    exit_code: int = 0,
    told: tuple[DeviceStatus, ...] = (),
    sampler: usage.Sampler | None = None,
    **more: Any,
) -> summaries.Summary:
    sampler = sampler or host.sampler()
    sampler.sample()
    account = Account(status())
    for one in (*told, after):
        account.add(one)
    result = JobResult(exit_code, 1.25)
    return summaries.summarize("job", result, sampler, LOCAL, account, after, shared=False, **more)


def test_only_what_was_paged_meanwhile_counts(host: Host) -> None:
    found = summary(host, status(pages_in=110, pages_in_remote=85, pages_in_backup=35))
    assert (found.page_in_bytes, found.page_out_bytes) == (100 * 4096, 0)
    assert (found.page_in_remote_bytes, found.page_in_backup_bytes) == (75 * 4096, 25 * 4096)
    assert found.remote_share == 0.75
    assert found.command == "job"
    text = "\n".join(closing.describe(found))
    assert "donors 75.0%, staging 0.0%, disk 25.0%" in text
    assert "other swap areas" not in text


def test_without_paging_no_shares_are_claimed(host: Host) -> None:
    found = summary(host, status())
    assert found.remote_share is None
    happened, waited, _ = closing.describe(found)
    assert happened.endswith("with 64.0 MiB local, nothing paged out")
    assert waited == "waited for no donor and no disk"
    found = summary(host, status(pages_out=20))
    assert closing.describe(found)[0].endswith(", paged out 40.0 KiB, in 0 B")


def test_what_zswap_has_kept_from_the_device_was_paged_out_all_the_same(host: Host) -> None:
    host.set(swapped=8 * MIB)
    found = summary(host, status())
    said = "paged out 8.00 MiB, none of it to the device"
    assert closing.describe(found)[0].endswith(said)
    use = ZswapUse("job", 9 * MIB, 5 * MIB, None, 2 * MIB, None)
    lines = closing.describe(dataclasses.replace(found, zswap=use))
    assert lines[0].endswith(f"{said}, {compressed.describe(use)}")


def test_a_job_that_pages_all_the_time_is_shown_where_to_look(host: Host) -> None:
    peak_pages = summary(host, status()).anon_peak_bytes // 4096
    for pages_in, is_shown in ((10 + peak_pages, False), (11 + peak_pages, True)):
        text = "\n".join(closing.describe(summary(host, status(pages_in=pages_in))))
        assert ("docs/when-to-use.md" in text) == is_shown


def test_what_was_counted_before_a_take_over_stays_in_the_summary(host: Host) -> None:
    """`status` counts from 10; a successor counts from zero."""
    none = {"pages_in": 0, "pages_in_remote": 0, "pages_in_staging": 0, "pages_in_backup": 0}
    told = (
        status(pages_out=50_010, pages_in=1_010, pages_in_remote=910, pages_in_backup=110),
        status([], 1, **{**none, "pages_out": 0}),
        status([], 1, **{**none, "pages_out": 5, "pages_in": 20, "pages_in_remote": 20}),
    )
    found = summary(host, status([], 2, **{**none, "pages_out": 20}), told=told)
    assert found.page_out_bytes == (50_000 + 5 + 20) * 4096
    assert found.page_in_bytes == (1_000 + 20) * 4096
    assert found.page_in_remote_bytes == (900 + 20) * 4096
    assert found.remote_share == pytest.approx(0.902, abs=0.001)
    assert found.take_overs == 2
    assert "2 take-overs by another process of the device" in closing.describe(found)[1]


def test_the_summary_says_why_pages_came_from_the_disk(host: Host) -> None:
    reasons = {"fallback_unmapped": 256, "fallback_suspended": 512, "fallback_slow": 0}
    found = summary(host, status(pages_in_backup=778, **reasons))
    assert found.page_in_backup_why["unmapped"] == MIB
    text = "\n".join(closing.describe(found))
    assert "disk 1.00 MiB because the slab had no donor, 2.00 MiB because its donor was un" in text
    assert "More donors: --donors" in text
    assert "slow" not in text
    assert "because" not in "\n".join(closing.describe(summary(host, status(pages_in=20))))


def donor(state: str, *, given_up: int = 0, detail: str = "") -> DonorRow:
    row = donor_row("10.0.0.2:9", "moon", state)
    return msgspec.structs.replace(row, given_up=given_up, detail=detail)


def test_a_donor_that_goes_is_told_once_and_once_when_it_is_back(host: Host) -> None:
    told = (
        status([donor("mapped")]),
        status([donor("suspended", detail="connections lost")]),
        status([donor("idle", given_up=1, detail="donor 10.0.0.2:9: connection refused. Retry.")]),
        status([donor("idle", given_up=1)]),
        status([donor("mapped", given_up=1)]),
        status([donor("mapped", given_up=1)]),
    )
    account = Account(status([donor("mapped")]))
    assert [account.add(one) for one in told] == [
        [],
        [],
        [
            "donor 10.0.0.2:9 (moon) is gone: connection refused. The pages that it held are read "
            "from the local disk."
        ],
        [],
        ["donor 10.0.0.2:9 (moon) is back and holds pages again"],
        [],
    ]
    text = "\n".join(closing.describe(summary(host, told[-1], told=told)))
    assert "donors gone meanwhile: 10.0.0.2:9 (connection refused)" in text


def test_a_donor_that_stays_away_is_told_though_it_is_not_given_up() -> None:
    account = Account(status([donor("mapped")]))
    away = status([donor("suspended", detail="connections lost")], 0, None)
    assert account.add(away) == []
    (line,) = account.add(away)
    assert "is gone: connections lost. There is no backup" in line
    assert account.add(away) == []
    assert account.add(status([donor("mapped")])) != []


def test_a_donor_that_a_new_process_of_the_device_reclaims_has_not_gone() -> None:
    account = Account(status([donor("mapped", given_up=3)]))
    taken_over = [donor("suspended", detail="taken over from a process that ended")]
    assert account.add(status([donor("suspended", given_up=3)])) == []
    assert account.add(status(taken_over, 1)) == []
    assert account.add(status([donor("mapped")], 1)) == []
    assert account.donors_gone == {}


# ------------------------------------------------------------------------ live line


@given(st.lists(st.text("ab", min_size=1, max_size=30), min_size=1), st.integers(0, 300))
def test_the_live_line_fits_and_says_the_first_facts_first(facts: list[str], columns: int) -> None:
    line = fit(facts, columns)
    assert len(line) <= columns
    whole = "infiniswap: " + ", ".join(facts)
    if len(whole) <= columns:
        assert line == whole
    elif line.startswith("infiniswap: "):
        # No fact is cut, and the next one has no room.
        shown = next(n for n in range(len(facts)) if line == "infiniswap: " + ", ".join(facts[:n]))
        assert len(line + ", " + facts[shown]) > columns
    else:
        assert line.startswith(facts[0][:columns])


def test_a_live_line_of_80_columns_says_what_is_paged_out_and_who_serves_it(host: Host) -> None:
    host.set(anon=32 * MIB, swapped=200 * MIB)
    sampler = host.sampler()
    sampler.sample()
    assert sampler.memory is not None
    told = Account(status())
    told.add(status(pages_in=1 << 20, pages_in_remote=993, pages_in_backup=27))
    facts = usage.describe_progress(sampler.memory, LOCAL, told)
    assert fit(facts, 77) == (
        "infiniswap: 200 MiB paged out, 98% from donors, 32.0 MiB of 64.0 MiB local"
    )


def test_a_take_over_lowers_no_figure_of_the_live_line(host: Host) -> None:
    sampler, told = host.sampler(), Account(status())
    sampler.sample()
    assert sampler.memory is not None
    told.add(status(pages_in=25_610, pages_in_remote=1_010))
    before = usage.describe_progress(sampler.memory, LOCAL, told)
    told.add(status([], 1, pages_in=0, pages_in_remote=0, pages_in_staging=0, pages_in_backup=0))
    assert usage.describe_progress(sampler.memory, LOCAL, told) == before
    assert before[1] == "100% from donors"
    assert before[-1] == "page-in 100 MiB"


def test_a_line_shows_no_escapes_of_what_it_names(capfd: pytest.CaptureFixture[str]) -> None:
    say("\x1b[31mred\x07\udcff\n: exit code 0")
    assert capfd.readouterr().err == "infiniswap: ?[31mred???: exit code 0\n"


# ------------------------------------------------------------------------- the kernel's kills


def test_the_limit_that_ran_out(host: Host) -> None:
    host.set(anon=LOCAL, oom_kills=1, both_peak=LOCAL)
    found = summary(host, status(), 137)
    assert (found.oom_kills, found.limit) == (1, "local")
    text = closing.describe_oom(found)
    assert "killed 1 process of the job" in text
    assert "local memory of 64.0 MiB (--local) ran out" in text
    host.set(anon=LOCAL, oom_kills=2, both_peak=LOCAL + 256 * MIB)
    found = summary(host, status(), 137)
    assert (found.limit, found.killed_by) == ("device", "kernel")
    text = closing.describe_oom(found)
    assert "killed 2 processes of the job" in text
    assert "the whole swap device of 256 MiB. Give a larger --size." in text
    text = closing.describe_oom(dataclasses.replace(found, limit="zswap"))
    assert "local memory of 64.0 MiB (--local) ran out, and memory.zswap.writeback" in text
    assert "Write 1 there, or switch zswap off." in text


@pytest.mark.parametrize(
    ("leaving", "samples", "path"),
    [("gone", 90, OURS), (OURS, 1, OURS), ("/dev/other", 1, "/dev/other"), ("/dev/other", 90, "")],
)
def test_a_swapoff_by_somebody_else_is_the_reason_told(
    host: Host, leaving: str, samples: int, path: str
) -> None:
    """Of any area, as all may hold pages of the job; one that ended long ago is no reason."""
    sampler = host.sampler()
    if leaving == "gone":
        host.areas = []
    else:
        host.leaving = SwapArea(leaving, "partition", GIB, MIB, 5)
    sampler.sample()
    host.leaving = None
    for _ in range(samples):
        sampler.sample()
    host.set(anon=LOCAL, oom_kills=1, both_peak=LOCAL + (MIB if not path else 256 * MIB))
    found = summary(host, status(), 137, sampler=sampler)
    assert (found.limit, found.taken_off) == ("swapoff" if path else "local", path)
    text = closing.describe_oom(found)
    assert (f"somebody else took the swap area {path} out of use (swapoff)" in text) is bool(path)
    assert ("larger --local" in text) is not bool(path)


def test_every_alarm_is_told_at_once_and_as_the_reason(host: Host) -> None:
    """Also one that is over when the job has ended: its pages are no longer written then."""
    disk, other = "the backup /b refuses writes: No space left on device", "page 3 came back"
    alarmed = [msgspec.structs.replace(status(), alarms=alarms) for alarms in ([disk], [other])]
    account = Account(status())
    assert [account.add(one) for one in (*alarmed, *alarmed, status())] == [
        [f"warning: {disk}"],
        [f"warning: {other}"],
        *([[]] * 3),
    ]
    host.set(anon=LOCAL, oom_kills=1, both_peak=LOCAL)
    found = summary(host, status(), 137, told=tuple(alarmed))
    assert (found.limit, found.alarms) == ("alarm", (disk, other))
    text = closing.describe_oom(found)
    assert f"The device reported: {disk}; {other}." in text
    assert text.endswith("(df -h, dmesg), or name another place with --backup.")
    assert "larger --local" not in text
    assert sum(disk in line for line in closing.describe(found)) == 1
    host.set()
    survived = closing.describe(summary(host, status(), told=tuple(alarmed)))[-1]
    assert survived.startswith(f"advice: the device reported: {disk}; {other}. Free space on")


@pytest.mark.parametrize("by_us", [True, False])
def test_a_kill_by_another_process_is_told_from_the_kernels(host: Host, by_us: bool) -> None:
    sampler, account = host.sampler(), Account(status())
    sampler.sample()
    result = JobResult(137, 1.0, is_explained=by_us)
    found = summaries.summarize("job", result, sampler, LOCAL, account, status(), shared=False)
    assert found.killed_by == ("" if by_us else "other")
    text = "\n".join(closing.describe(found))
    assert ("Another process sent it" in text) is not by_us


def test_a_kill_below_the_limit_was_for_the_hosts_memory(host: Host, tmp_path: Path) -> None:
    host.set(anon=LOCAL // 2, oom_kills=1, both_peak=LOCAL // 2)
    found = summary(host, status(), 137)
    assert found.limit == "host"
    assert "not its local memory" in closing.describe_oom(found)
    # Version 2 says whose limit it was, however full the job's own memory is.
    (tmp_path / "memory.stat").write_text(f"anon {LOCAL}\n")
    (tmp_path / "memory.current").write_text(f"{LOCAL}\n")
    for ooms, limit in ((0, "host"), (1, "local")):
        (tmp_path / "memory.events").write_text(f"oom {ooms}\noom_kill 1\n")
        cgroup = MemoryCgroup(tmp_path, 2)
        sampler = usage.Sampler(cgroup, OURS, lambda: host.areas, lambda: None)
        assert summary(host, status(), 137, sampler=sampler).limit == limit


# ------------------------------------------------------------------- page-ins, other areas, cost


def test_page_ins_that_waited_are_told_apart(host: Host) -> None:
    figures = {"read_requests": 900, "read_requests_waited": 30, "read_requests_waited_us": 250_000}
    found = summary(host, status(pages_in=910, pages_in_remote=910, **figures))
    assert (found.page_ins_waited, found.page_ins_ready) == (30, 870)
    assert found.page_in_waited_s == 0.25
    assert closing.describe(found)[1] == (
        "waited 0.2 s of 1.2 s (20%) for donors and disk: 30 page-ins (p50 100 µs, p99 2000 µs, "
        "870 more had their pages at once)"
    )
    found = summary(host, status(pages_in=910, read_requests=900, pages_in_staging=910))
    assert "p50" not in "\n".join(closing.describe(found))


def test_waits_of_several_threads_are_no_share_of_the_time(host: Host) -> None:
    figures = {"read_requests_waited": 30, "read_requests_waited_us": 2_500_000}
    found = summary(host, status(pages_in=910, **figures))
    assert (
        "waited 2.5 s (several threads at once) for donors and disk: 30"
        in closing.describe(found)[1]
    )
    found = dataclasses.replace(found, shared=True)
    assert "2.5 s (all that use the device together) for" in closing.describe(found)[1]


def test_page_outs_that_waited_for_a_buffer_are_a_reason(host: Host) -> None:
    text = closing.describe(summary(host, status(staging_waits=3)))[1]
    assert text.endswith(": 3 page-outs found no free staging buffer")


def test_the_end_has_three_lines_and_warnings_stand_before_them(host: Host) -> None:
    """One thing that needs action is the advice; further ones are warnings."""
    host.areas.append(SwapArea("/dev/plain", "partition", GIB, 0, 5))
    sampler = host.sampler()
    host.set(swapped=40 * MIB)
    host.use("/dev/plain", 8 * MIB)
    alarmed = msgspec.structs.replace(status(), alarms=["the backup /b refuses writes"])
    sealed = {"/dev/plain": False}
    found = summary(host, status(), told=(alarmed,), sampler=sampler, sealed=sealed)
    warning, happened, waited, advice = closing.describe(found)
    assert warning.startswith("warning: up to 8.00 MiB went to other swap areas of this host: ")
    assert happened.startswith("job: exit code 0 after 1.2 s, peak memory 40.0 MiB with 64.0 MiB")
    assert waited.startswith("waited ")
    assert advice.startswith("advice: the device reported: the backup /b refuses writes")
    assert len(closing.describe(dataclasses.replace(found, other_areas=()))) == 3
    assert len(closing.describe(dataclasses.replace(found, other_areas=(), alarms=()))) == 3


def test_pages_in_other_areas_are_named_and_unsealed_ones_told(host: Host) -> None:
    names = ("/dev/plain", "/dev/dm-0", "/dev/unused", "/dev/gone")
    host.areas += [SwapArea(path, "partition", GIB, 0, 5) for path in names]
    sampler = host.sampler()
    host.set(swapped=40 * MIB)
    for path, mib in zip(names, (8, 16, 0, 2), strict=True):
        host.use(path, mib * MIB)
    found = summary(
        host, status(), sampler=sampler, sealed={"/dev/plain": False, "/dev/dm-0": True}
    )
    assert closing.describe(found)[-1] == (
        "advice: up to 26.0 MiB went to other swap areas of this host: /dev/dm-0 (16.0 MiB, "
        "sealed), /dev/gone (2.00 MiB), /dev/plain (8.00 MiB, not sealed). To keep pages out of "
        "areas that do not seal them: swapoff /dev/plain"
    )
    (line,) = other_areas.describe(host.areas[1:2], OURS, {"/dev/plain": False})
    assert line.endswith("is used when ours is full, and keeps pages unsealed")


@pytest.mark.parametrize(("swapped_mib", "is_too_dear"), [(200, False), (100, True), (0, True)])
def test_paging_that_took_more_than_it_saved_is_advised_against(
    host: Host, swapped_mib: int, is_too_dear: bool
) -> None:
    host.set(anon=LOCAL, swapped=swapped_mib * MIB)
    found = summary(host, status(), cost=Cost(150 * MIB, 256 * MIB, 96 * MIB))
    advice = closing.describe(found)[-1]
    too_dear = "advice: paging took 150 MiB of this host's memory beside --local and saved "
    assert advice.startswith(too_dear) is is_too_dear
    assert "paging took" not in closing.describe(summary(host, status()))[-1]


@pytest.mark.parametrize(
    ("local_mib", "swapped_mib", "advice"),
    [
        (20, 0, "it used at most 20.0 MiB of its local memory: a smaller --local is enough"),
        (60, 0, "the smallest --local for a given slowdown: infiniswap plan -- job ..."),
        (60, 90, "the smallest --local for a given slowdown: infiniswap plan -- job ..."),
    ],
)
def test_a_job_without_problems_is_shown_a_command_that_helps(
    host: Host, local_mib: int, swapped_mib: int, advice: str
) -> None:
    host.set(anon=local_mib * MIB, swapped=swapped_mib * MIB)
    assert closing.describe(summary(host, status()))[-1].startswith(f"advice: {advice}")


@pytest.mark.parametrize(
    ("on", "own", "above", "limit"),
    [("Y", 0, 1, "zswap"), ("Y", 1, 0, "zswap"), ("Y", 1, 1, "local"), ("N", 0, 0, "local")],
)
def test_a_job_killed_because_its_pages_may_not_leave_zswap(
    tmp_path: Path, on: str, own: int, above: int, limit: str
) -> None:
    job, enabled = tmp_path / "job", tmp_path / "sys/module/zswap/parameters/enabled"
    enabled.parent.mkdir(parents=True)
    enabled.write_text(f"{on}\n")
    job.mkdir()
    (job / "memory.stat").write_text("anon 4096\n")
    (job / "memory.events").write_text("oom_kill 1\n")
    (job / "memory.zswap.writeback").write_text(f"{own}\n")
    (tmp_path / "memory.zswap.writeback").write_text(f"{above}\n")
    area = SwapArea(OURS, "partition", GIB, 0, 100)
    sampler = usage.Sampler(
        MemoryCgroup(job, 2), OURS, lambda: [area], lambda: None, tmp_path / "sys"
    )
    sampler.sample()
    account, result = Account(status()), JobResult(137, 1.0)
    found = summaries.summarize("job", result, sampler, LOCAL, account, status(), shared=False)
    assert found.limit == limit


@pytest.mark.parametrize(
    ("priority", "when"),
    [(99, "when ours is full"), (100, "in turn with ours"), (101, "before ours")],
)
def test_other_areas_are_named_with_their_turn(host: Host, priority: int, when: str) -> None:
    other = SwapArea("/dev/other", "partition", GIB, MIB, priority)
    (line,) = other_areas.describe([*host.areas, other], OURS, {})
    assert "/dev/other" in line
    assert when in line
    assert other_areas.describe(host.areas, OURS, {}) == []


# ---------------------------------------------------------------------------- size


@given(st.dictionaries(st.text(), st.integers(0, 1 << 60), min_size=1))
def test_no_choice_is_exceeded_and_only_whole_mebibytes_are_given(choices: dict[str, int]) -> None:
    size_bytes, why = usage.choose_size(choices)
    assert why in choices
    assert size_bytes % MIB == 0
    assert all(size_bytes <= value for value in choices.values())
    assert choices[why] - size_bytes < MIB
