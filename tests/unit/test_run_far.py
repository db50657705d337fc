# SPDX-License-Identifier: Apache-2.0
"""`run --paging far`: when it is refused, what the job gets, and what the end says of it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.device_status import device_status

from infiniswap.cli.run import far
from infiniswap.device.api import FarRow, SuccessionRow
from infiniswap.device.jobs import closing, usage
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.cost import RING_BYTES
from infiniswap.device.jobs.job import JobResult, Preload
from infiniswap.device.jobs.summary import Summary, summarize
from infiniswap.errors import InfiniswapError, UnavailableError, UsageError
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.userfault import Obstacle
from infiniswap.units import MIB


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libagent.so"
    path.write_bytes(b"")
    return path


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/overcommit_memory").write_text("0\n")
    return tmp_path


def wanted(library: Path, proc: Path, **more: Any) -> far.FarPaging | None:
    args = argparse.Namespace(paging=more.pop("paging", "far"), device=more.pop("device", None))
    command, local_bytes = more.pop("command", ["sh"]), more.pop("local_bytes", 64 * MIB)
    given = {"library": library, "obstacle": lambda: None, "proc": proc, **more}
    return far.wanted(args, command, None, local_bytes, **given)


def refused(kind: type[InfiniswapError], *given: Any, **more: Any) -> str:
    with pytest.raises(kind) as caught:
        wanted(*given, **more)
    text = str(caught.value)
    assert text.endswith("or run it with --paging swap."), text
    return text


def test_swap_alone_needs_nothing_of_this(library: Path, proc: Path) -> None:
    obstacle = Obstacle("old", "Mend it.")
    assert wanted(library, proc, paging="swap", device="x", obstacle=lambda: obstacle) is None


def test_a_usual_program_on_a_host_that_can_has_far_memory(library: Path, proc: Path) -> None:
    assert wanted(library, proc) == far.FarPaging(library)


def test_arguments_that_exclude_far_memory_are_refused(library: Path, proc: Path) -> None:
    assert "together with --device" in refused(UsageError, library, proc, device="swap0")
    text = refused(UsageError, library, proc, local_bytes=63 * MIB)
    assert "at least 64M of local memory, not 63.0 MiB" in text


def test_a_host_that_cannot_is_refused_with_its_reason(library: Path, proc: Path) -> None:
    obstacle = Obstacle("Linux 6.1 cannot move pages", "Use Linux 7.0.")
    text = refused(UnavailableError, library, proc, obstacle=lambda: obstacle)
    assert text.startswith("--paging far is not possible here: Linux 6.1 cannot move pages. Use")
    assert "Linux 7.0, or run it" in text


def test_a_host_without_overcommit_is_refused(library: Path, proc: Path) -> None:
    (proc / "sys/vm/overcommit_memory").write_text("2\n")
    assert "vm.overcommit_memory=0" in refused(UnavailableError, library, proc)


@pytest.fixture(params=["RLIMIT_AS", "RLIMIT_DATA"])
def limit(request: pytest.FixtureRequest) -> Iterator[str]:
    number = getattr(resource, request.param)
    before = resource.getrlimit(number)
    resource.setrlimit(number, (1 << 42, before[1]))
    yield request.param
    resource.setrlimit(number, before)


def test_a_shell_with_little_address_space_is_refused(
    library: Path, proc: Path, limit: str
) -> None:
    text = refused(UnavailableError, library, proc)
    assert f"{limit} limits that. Take the limit back in this shell (ulimit -" in text


def test_a_library_that_cannot_be_loaded_is_refused(proc: Path, tmp_path: Path) -> None:
    text = refused(InfiniswapError, tmp_path / "gone.so", proc)
    assert "cannot read the agent of far memory: No such file" in text
    blank = tmp_path / "a b.so"
    blank.write_bytes(b"")
    assert "has a blank" in refused(UnavailableError, blank, proc)


def test_a_program_without_an_agent_runs_with_swap_alone(
    library: Path, proc: Path, tmp_path: Path
) -> None:
    program = tmp_path / "old"
    program.write_bytes(b"\x7fELF\x01\x01" + bytes(58))
    program.chmod(0o755)
    found = wanted(library, proc, command=[str(program), "x"])
    assert found is not None
    assert found.unfit == f"{program} cannot load the agent: it is no 64-bit program"


@pytest.mark.parametrize(
    ("before", "after"), [({}, "/agent"), ({"LD_PRELOAD": "/mimalloc /x"}, "/agent:/mimalloc /x")]
)
def test_a_library_that_the_job_preloads_comes_behind_ours(
    before: dict[str, str], after: str
) -> None:
    preload = Preload("/agent", {"INFINISWAP_FAR": "600:601:/cgroup"}, (600, 601))
    found = preload.environment({**before, "A": "b"})
    assert found.pop("ASAN_OPTIONS") == "verify_asan_link_order=0"
    assert found == {"A": "b", "INFINISWAP_FAR": "600:601:/cgroup", "LD_PRELOAD": after}
    assert "INFINISWAP_FAR" not in os.environ


def test_options_of_a_sanitizer_come_behind_ours() -> None:
    found = Preload("/agent", {}, ()).environment({"ASAN_OPTIONS": "detect_leaks=0"})
    assert found["ASAN_OPTIONS"] == "verify_asan_link_order=0:detect_leaks=0"


@pytest.mark.requires_native
@pytest.mark.requires_tool("nm")
def test_the_agent_needs_nothing_that_another_c_library_lacks() -> None:
    """A job may start programs of musl, whose loader ends them where a name is missing."""
    command = ["nm", "-D", "--undefined-only", str(far.agent_library())]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r" U ([^@\n]+)", names)
    assert "mmap" in needed or "memcpy" in needed
    of_glibc = re.compile(r"_chk$|^__isoc23_|^__register_atfork$|^__libc_")
    assert [name for name in needed if of_glibc.search(name)] == []


def test_the_ring_is_as_large_as_the_devices(project_root: Path) -> None:
    header = (project_root / "csrc/far/ring.h").read_text()
    slots = sum(int(n) for n in re.findall(r"#define ISWF_(?:READ|WRITE)_SLOTS +(\d+)u", header))
    assert "#define ISWF_BLOCK_BYTES (2u << 20)" in header
    assert slots * 2 * MIB == RING_BYTES


# ------------------------------------------------------------------------------ the end


def row(away_bytes: int = 0, problem: str = "", /, **counts: int) -> FarRow:
    fields: dict[str, Any] = {"bytes": 256 * MIB, "jobs": 1, "processes": 1, "counts": counts}
    return FarRow(used_bytes=8 * MIB, away_bytes=away_bytes, problem=problem, **fields)


def ended(tmp_path: Path, *rows: FarRow | None, unfit: str = "", **stats: int) -> Summary:
    """The summary of a job during which the device said this, each time by another process."""
    statuses = [
        device_status(
            pid=number,
            far=one,
            stats=stats,
            succession=SuccessionRow(
                holder_pid=1, standby="ready", take_overs=number, reason="", pause_ms=0.0
            ),
        )
        for number, one in enumerate(rows)
    ]
    (tmp_path / "memory.stat").write_text(f"anon {4 * MIB}\n")
    sampler = usage.Sampler(MemoryCgroup(tmp_path, 2), "/dev/ours", list, lambda: None)
    told = Account(device_status(pid=9, far=row()))
    for status in statuses:
        told.add(status)
        sampler.far_bytes = told.far_bytes
        sampler.sample()
    result = JobResult(0, 2.0)
    return summarize(
        "job", result, sampler, 64 * MIB, told, statuses[-1], shared=False, unfit=unfit
    )


def test_far_memory_counts_over_take_overs_and_into_the_peak(tmp_path: Path) -> None:
    """The successor tells less until all processes have come back to it."""
    first = row(2 * MIB, pages_out=768, pages_in=256, back_fork=3, fetches=1, back_locked=0)
    away = row(0, "starting")
    back = row(0, pages_out=1024, pages_in=512, back_fork=4, fetches=5, fetch_wait_ns=3 * 10**8)
    found = ended(tmp_path, first, away, back, pages_out=2048)
    assert found.far is not None
    assert (found.far.out_bytes, found.far.in_bytes) == (4 * MIB, 2 * MIB)
    assert found.far.handed_back_bytes == {"fork": 4 * 4096}
    assert (found.far.fetches, found.far.lost_pages, found.far.problem) == (5, 0, "starting")
    assert found.anon_peak_bytes == 6 * MIB
    assert found.far.peak_bytes == 2 * MIB
    happened, waited, _ = closing.describe(found)[-3:]
    assert (
        ", of that 4.00 MiB and 2.00 MiB as far memory, handed back to swap 16.0 KiB (fork)"
        in happened
    )
    assert "0.3 s for far memory (5 blocks, 0 parts of blocks)" in waited


def test_waits_for_room_are_part_of_the_time_and_get_advice(tmp_path: Path) -> None:
    counts = {"pages_out": 9, "room_waits": 7, "room_wait_ns": 10**9, "fetch_wait_ns": 5 * 10**8}
    found = ended(tmp_path, row(2 * MIB, fetches=1, **counts))
    *_, waited, advice = closing.describe(found)
    assert waited.startswith("waited 1.5 s of 2.0 s (75%) for donors and disk: 0.5 s for far m")
    assert "1.0 s until other blocks had left to make room" in waited
    assert advice.endswith("A faster disk for the backup: --backup PATH")


def test_pauses_are_counted_and_long_ones_get_advice(tmp_path: Path) -> None:
    counts = {"pages_out": 9, "pauses": 2, "pause_ns": 15 * 10**8}
    found = ended(tmp_path, row(2 * MIB, **counts))
    assert found.far is not None
    assert (found.far.pauses, found.far.pause_s) == (2, 1.5)
    advice = closing.describe(found)[-1]
    assert advice.startswith("advice: for 2 s it touched pages at random, which far memory left to")
    assert "--paging swap" in advice
    told = Account(device_status(far=row()))
    for paused_ns, pauses in ((0, False), (10**9, True), (10**9, False)):
        told.add(device_status(far=row(pause_ns=paused_ns)))
        assert told.far_pauses is pauses
    counts["pause_ns"] = 10**8
    assert "at random" not in closing.describe(ended(tmp_path, row(2 * MIB, **counts)))[-1]


def test_processes_without_an_agent_are_counted_with_the_reason(tmp_path: Path) -> None:
    text = closing.describe(ended(tmp_path, row(off_permission=2, off_kernel=0)))[0]
    assert "never far 2 processes (userfaultfd may not be used)" in text


def test_every_reason_of_the_agent_has_words(project_root: Path) -> None:
    header = (project_root / "csrc/far/ring.h").read_text()
    for prefix, words in (("WHY", closing._BACK), ("OFF", closing._NEVER)):
        names = set(re.findall(rf"\bISWF_{prefix}_([A-Z]+)\b", header)) - {"NONE"}
        assert {name.lower() for name in names} == set(words)


def test_without_far_memory_nothing_is_said_of_it(tmp_path: Path) -> None:
    found = ended(tmp_path, None)
    assert found.far is None
    assert "far" not in "\n".join(closing.describe(found))


def test_a_job_that_could_have_no_agent_is_said_to_have_run_with_swap(tmp_path: Path) -> None:
    found = ended(tmp_path, None, unfit="x cannot load the agent: it is statically linked")
    assert found.far is not None
    assert "by swap alone (x cannot load the agent: it is static" in closing.describe(found)[0]


@pytest.mark.parametrize(("swapped", "said"), [(64 * MIB, True), (0, False)])
def test_memory_that_stayed_near_is_advised_to_go_by_swap(
    tmp_path: Path, swapped: int, said: bool
) -> None:
    found = ended(tmp_path, row(pages_out=2))
    assert found.far is not None
    far = dataclasses.replace(found.far, swap_bytes=swapped, handed_back_bytes={}, never={})
    text = "\n".join(closing.describe(dataclasses.replace(found, far=far)))
    assert ("little of its memory went far" in text) is said


def test_lost_pages_are_counted_and_come_before_all_other_advice(tmp_path: Path) -> None:
    found = dataclasses.replace(ended(tmp_path, row(pages_lost=3)), alarms=("a disk fails",))
    warning, *_, advice = closing.describe(found)
    assert advice.startswith("advice: far memory was lost: a donor went")
    assert "3 pages of what was wanted could not be brought back" in advice
    assert "SIGBUS" in advice
    assert "a disk fails" in warning
