# SPDX-License-Identifier: Apache-2.0
"""The last lines of `infiniswap run`: what happened, how much of the time went to waiting and why,
and one piece of advice. --summary-json has everything else.

What needs somebody's action is the advice; where there is more than one such thing, the others come
before the three lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from infiniswap.device.jobs import compressed, heaps
from infiniswap.device.jobs.summary import WHY, Summary
from infiniswap.documents import page
from infiniswap.remedies import REMEDIES
from infiniswap.units import MIB, counted, format_size_short

_DISK_SHARE: Final = 0.1
"""A smaller part of the page-ins from the disk is no reason for advice."""

_ROOM_TIME_SHARE: Final = 0.1
"""Waiting for room shorter than this part of the time is no reason for advice."""

_PAUSE_TIME_SHARE: Final = 0.2
"""Pauses of far memory shorter than this part of the time are no reason for advice."""

_ROOM_SHARE: Final = 0.5
"""A job that never used more of --local than this is told so."""

_FAR_SHARE: Final = 0.1
"""Far memory is little if it is less than this part of what left by swap."""

_SWAP_BYTES_MIN: Final = 16 * MIB
"""A job from which less left by swap gets no advice about that."""

_BACK: Final = {
    "fork": "fork",
    "locked": "mlock",
    "protected": "mprotect",
    "policy": "a NUMA policy",
    "fixed": "mapped over",
    "moved": "mremap of a part",
    "advice": "madvise",
    "ended": "mlockall, seccomp or a limit of addresses",
    "pinned": "pinned by the kernel",
    "stack": "a thread's stack",
}
"""Why memory was handed back (enum iswf_why in csrc/far/ring.h)."""

_NEVER: Final = {
    "kernel": "the kernel cannot move pages",
    "permission": "userfaultfd may not be used",
    "cgroup": "the job's cgroup cannot be read",
    "addresses": "too little address space",
    "locked": "mlockall",
    "threads": "no thread can be started",
    "resources": "too few descriptors or too little memory",
    "device": "the device did not answer in time",
    "sandbox": "a sandbox (seccomp)",
    "version": "an agent of another version than the device",
}
"""Why a process had no agent (enum iswf_off there)."""


def describe(summary: Summary) -> list[str]:
    """The closing lines: those that need action, but for the first, and the three."""
    problems = tuple(_problems(summary))
    advice = next(iter(problems or _hints(summary)))
    return [
        *(f"warning: {problem}" for problem in problems[1:]),
        _happened(summary),
        _waited(summary),
        f"advice: {advice}",
    ]


# -------------------------------------------------------------------------- what happened


def _happened(s: Summary) -> str:
    text = (
        f"{s.command}: exit code {s.exit_code} after {s.elapsed_s:.1f} s, peak memory "
        f"{format_size_short(s.anon_peak_bytes)} with {format_size_short(s.local_bytes)} local, "
        f"{_paged(s)}"
    )
    if s.zswap is not None:
        text += f", {compressed.describe(s.zswap)}"
    if s.shared_areas:
        return f"{text} (swap areas shared with other runs: {', '.join(s.shared_areas)})"
    paged = s.page_in_bytes or s.page_out_bytes
    return f"{text} (of all that use the device)" if s.shared and paged else text


def _paged(s: Summary) -> str:
    text = _paged_by_device(s)
    far = s.far
    if far is None:
        return text
    if far.unfit:
        return f"{text} by swap alone ({far.unfit})"
    text += (
        f", of that {format_size_short(far.out_bytes)} and {format_size_short(far.in_bytes)} as "
        "far memory"
    )
    if back := ", ".join(
        f"{format_size_short(part)} ({_BACK.get(reason, reason)})"
        for reason, part in far.handed_back_bytes.items()
    ):
        text += f", handed back to swap {back}"
    if never := ", ".join(
        f"{counted(number, 'process')} ({_NEVER.get(reason, reason)})"
        for reason, number in far.never.items()
    ):
        text += f", never far {never}"
    return text


def _paged_by_device(s: Summary) -> str:
    if not s.page_in_bytes and not s.page_out_bytes:
        if s.swap_peak_bytes:
            return f"paged out {format_size_short(s.swap_peak_bytes)}, none of it to the device"
        return "nothing paged out"
    text = (
        f"paged out {format_size_short(s.page_out_bytes)}, in {format_size_short(s.page_in_bytes)}"
    )
    served = _served(s)
    if not served:
        return text
    shares = (s.page_in_remote_bytes, s.page_in_staging_bytes, s.page_in_backup_bytes)
    donors, staging, disk = (f"{part / served:.1%}" for part in shares)
    return f"{text} (donors {donors}, staging {staging}, disk {disk})"


def _served(s: Summary) -> int:
    return s.page_in_remote_bytes + s.page_in_staging_bytes + s.page_in_backup_bytes


# ------------------------------------------------------------------------------- the time


def _waited(s: Summary) -> str:
    parts = tuple(_reasons(s))
    waited_s = s.page_in_waited_s
    if s.far is not None:  # whose fetches are among the device's page-ins
        waited_s = max(waited_s, s.far.fetch_wait_s) + s.far.room_wait_s
    if not parts:
        return "waited for no donor and no disk"
    share = ""
    if s.shared:
        share = " (all that use the device together)"
    elif waited_s > s.elapsed_s:
        share = " (several threads at once)"
    elif s.elapsed_s:
        share = f" of {s.elapsed_s:.1f} s ({waited_s / s.elapsed_s:.0%})"
    return f"waited {waited_s:.1f} s{share} for donors and disk: {'; '.join(parts)}"


def _reasons(s: Summary) -> Iterator[str]:
    if s.far is not None and (s.far.fetches or s.far.small_fetches):
        yield (
            f"{s.far.fetch_wait_s:.1f} s for far memory ({counted(s.far.fetches, 'block')}, "
            f"{counted(s.far.small_fetches, 'part')} of blocks)"
        )
    if s.far is not None and s.far.room_waits:
        yield f"{s.far.room_wait_s:.1f} s until other blocks had left to make room"
    if s.page_ins_waited:
        ready = f", {s.page_ins_ready} more had their pages at once" if s.page_ins_ready else ""
        yield (
            f"{counted(s.page_ins_waited, 'page-in')} (p50 {s.page_in_us_p50:.0f} µs, p99 "
            f"{s.page_in_us_p99:.0f} µs{ready})"
        )
    if why := ", ".join(
        f"{format_size_short(part)} because {WHY[name]}"
        for name, part in s.page_in_backup_why.items()
        if part
    ):
        yield f"from the disk {why}"
    if s.page_outs_waited:
        yield f"{counted(s.page_outs_waited, 'page-out')} found no free staging buffer"
    if s.take_overs:
        yield (
            f"{counted(s.take_overs, 'take-over')} by another process of the device, with up to a "
            "second before each not counted"
        )


# ------------------------------------------------------------------------------- advice


def _problems(s: Summary) -> Iterator[str]:
    """What needs somebody's action, the most urgent first."""
    if s.far is not None and s.far.lost_pages:
        yield (
            "far memory was lost: a donor went, and no other copy was left. "
            f"{counted(s.far.lost_pages, 'page')} of what was wanted could not be brought back; a "
            "program that touches one is ended by SIGBUS. Run it again with a backup (leave out "
            "--backup none)"
        )
    if s.oom_kills:
        yield describe_oom(s)
    if s.heap_by_limit:
        yield heaps.describe(s.heap_by_limit)
    if s.killed_by == "other":
        yield (
            "SIGKILL ended the command. Another process sent it (a person, earlyoom, systemd-oomd, "
            "a batch system): the kernel killed nothing for want of memory. Look for it: "
            "journalctl --since=-10min"
        )
    if s.alarms and s.limit not in ("device", "alarm"):
        yield f"the device reported: {'; '.join(s.alarms)}. {_remedies(s.alarms)}"
    if any(area.sealed is False for area in s.other_areas):
        plain = " ".join(shlex.quote(area.path) for area in s.other_areas if area.sealed is False)
        yield (
            f"{_other_areas(s)}. To keep pages out of areas that do not seal them: swapoff {plain}"
        )
    if s.far is not None and s.far.problem:
        yield (f"the device served no far memory for some time: {s.far.problem}. Its log says more")
    if s.donors_gone:
        gone = "; ".join(f"{address} ({why})" for address, why in s.donors_gone.items())
        yield f"donors gone meanwhile: {gone}. See how they are now: infiniswap status"


def _hints(s: Summary) -> Iterator[str]:
    """What would make the command faster or cheaper, the most useful first; at least one."""
    plan = f"infiniswap plan -- {shlex.quote(s.command)} ..."
    served = _served(s)
    saved = s.swap_peak_bytes + (s.far.peak_bytes if s.far is not None else 0)
    if s.cost is not None and s.cost.memory_bytes >= saved:
        yield (
            f"paging took {format_size_short(s.cost.memory_bytes)} of this host's memory beside "
            f"--local and saved {format_size_short(saved)}: start such a command "
            f"without `infiniswap run`, as {shlex.quote(s.command)} ..."
        )
    if s.far is not None and s.far.room_wait_s > _ROOM_TIME_SHARE * s.elapsed_s:
        yield (
            "much of the time went to waiting until blocks had left. A faster disk for the backup: "
            "--backup PATH"
        )
    if s.far is not None and s.far.pause_s > _PAUSE_TIME_SHARE * s.elapsed_s:
        yield (
            f"for {s.far.pause_s:.0f} s it touched pages at random, which far memory left to swap. "
            f"Compare with --paging swap; when that is so: {page('far-memory.md')}"
        )
    if s.far is not None and sum(s.far.handed_back_bytes.values()) > s.far.peak_bytes:
        yield (
            "most of its far memory was handed back. Compare with --paging swap; what is handed "
            f"back, and why: {page('far-memory.md')}"
        )
    if _stayed_near(s):
        yield (
            "little of its memory went far: it comes in small pieces, by system calls of the "
            "program's own (Go), is shared, or belongs to programs without the agent (forked ones, "
            "of another C library, with a sanitizer, or without LD_PRELOAD). Use --paging swap for "
            f"it; what goes far: {page('far-memory.md')}"
        )
    if s.zswap is not None and (harm := compressed.harm(s.zswap)):
        yield harm
    if served and s.page_in_backup_why["unmapped"] > _DISK_SHARE * served:
        yield (
            "many pages came from the disk because no donor had room for them. See who lends: "
            "infiniswap status. More donors: --donors HOST,HOST"
        )
    if s.page_in_bytes > s.anon_peak_bytes and not s.shared:
        yield (
            "all of its memory was paged in more than once. The limit at which it takes little "
            f"longer: {plan} What else helps: {page('when-to-use.md')}"
        )
    if s.other_swap_bytes:
        yield f"{_other_areas(s)}. A larger device takes all of it: --size"
    if not s.swap_peak_bytes and s.local_peak_bytes < _ROOM_SHARE * s.local_bytes:
        yield (
            f"it used at most {format_size_short(s.local_peak_bytes)} of its local memory: a "
            f"smaller --local is enough, which {plan} finds"
        )
    yield f"the smallest --local for a given slowdown: {plan}"


def _stayed_near(s: Summary) -> bool:
    """Whether swap took what could have been far, without a reason that is said elsewhere."""
    if s.far is None or s.far.unfit or s.far.never:
        return False
    swap_bytes = s.far.swap_bytes
    if sum(s.far.handed_back_bytes.values()) > _FAR_SHARE * swap_bytes:
        return False
    return swap_bytes >= _SWAP_BYTES_MIN and s.far.out_bytes < _FAR_SHARE * swap_bytes


def _other_areas(s: Summary) -> str:
    how = {True: ", sealed", False: ", not sealed", None: ""}
    named = ", ".join(
        f"{area.path} ({format_size_short(area.bytes_max)}{how[area.sealed]})"
        for area in s.other_areas
    )
    total = format_size_short(s.other_swap_bytes)
    return f"up to {total} went to other swap areas of this host: {named}"


def _remedies(alarms: Iterable[str]) -> str:
    """What to do about alarms, without a full stop: `infiniswap doctor` sees no device of a run
    that has ended."""
    found = (r for r in REMEDIES if any(r.words in alarm for alarm in alarms))
    steps = [r.for_next_run for r in found if r.for_next_run]
    return ". ".join(dict.fromkeys(steps)) or "See the donors (infiniswap status) and dmesg"


def describe_oom(summary: Summary) -> str:
    """Which limit ran out, and what to do."""
    killed = f"the kernel killed {counted(summary.oom_kills, 'process')} of the job: "
    local = format_size_short(summary.local_bytes)
    alarms = f" The device reported: {'; '.join(summary.alarms)}." if summary.alarms else ""
    if summary.limit == "swapoff":
        return (
            f"{killed}somebody else took the swap area {summary.taken_off} out of use (swapoff), "
            f"and its local memory of {local} (--local) could not hold what was there. Leave swap "
            "areas in use until the command has ended."
        )
    if summary.limit == "host":
        return (
            f"{killed}the memory of this host, or of a cgroup above the job's, ran out, not its "
            f"local memory of {local} (--local). `dmesg` names the limit."
        )
    if summary.limit == "device":
        return (
            f"{killed}it used up its {local} of local memory (--local) and the whole swap device "
            f"of {format_size_short(summary.device_bytes)}. Give a larger --size.{alarms}"
        )
    if summary.limit == "alarm":
        return (
            f"{killed}its local memory of {local} (--local) ran out, and the swap device did not "
            f"take what had to be paged out.{alarms} {_remedies(summary.alarms)}."
        )
    if summary.limit == "zswap":
        return (
            f"{killed}its local memory of {local} (--local) ran out, and memory.zswap.writeback of "
            "its cgroup, or of the one above, is 0: what zswap did not take could not be paged "
            "out. Write 1 there, or switch zswap off."
        )
    return (
        f"{killed}its local memory of {local} (--local) ran out, and what it held could not be "
        "paged out (locked, or kernel memory) though the swap device had room. Give a larger "
        "--local."
    )


def describe_others(areas: Iterable[str]) -> str:
    """That there are other runs, whose areas are these."""
    return (
        f"swap areas are shared with other runs ({', '.join(areas)}): the kernel has no private "
        "ones, so pages of each command lie in the areas of all"
    )
