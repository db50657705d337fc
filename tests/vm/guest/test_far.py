# SPDX-License-Identifier: Apache-2.0
"""Far memory on cgroup version 2, with ublk, and what a kernel too old for it answers.

Version 1 and FUSE: tests/system/test_run_far.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster
from support.jobs.far_job import FAR, FOREVER, check_rounds, fill, read, stop
from support.jobs.runs import Runner, ready
from support.machine.small_disk import small_disk

from infiniswap.system.files import parse_key_values
from infiniswap.units import MIB

pytestmark = pytest.mark.timeout(1800)

JOB_MIB, LOCAL_MIB = 96, 64
"""A block that comes back takes a tenth of a second here."""
FILE_MIB = 96
ROOMY_MIB, HIGH_MIB = 96, 60
WAITS = 'echo ready; read -r line; exec "$@"'
"""A job that begins when it is told to, so that its cgroup can be changed before that."""

on_ublk = pytest.mark.parametrize("frontend", ["ublk"], indirect=True)


@pytest.mark.full  # the one below it checks bytes and limit, too
@on_ublk
def test_a_job_goes_far_under_the_limit_of_version_2(frontend: str, runner: Runner) -> None:
    options = (*FAR, "--frontend", frontend)
    summary = runner.summary(*fill(1, JOB_MIB), options=options, local=f"{LOCAL_MIB}M")
    far = summary["far"]
    assert (far["unfit"], far["problem"], far["lost_pages"]) == ("", "", 0)
    assert (far["never"], far["handed_back_bytes"]) == ({}, {})
    assert far["peak_bytes"] > (JOB_MIB - LOCAL_MIB) * MIB
    assert min(far["out_bytes"], far["in_bytes"]) > (JOB_MIB - LOCAL_MIB) * MIB
    assert far["fetch_wait_s"] > 0
    assert summary["oom_kills"] == 0
    assert summary["local_peak_bytes"] <= LOCAL_MIB * MIB
    assert summary["swap_peak_bytes"] < 16 * MIB
    assert summary["page_in_remote_bytes"] > 0
    assert runner.leftovers() == []


@pytest.fixture
def input_file(tmp_path: Path) -> Iterator[Path]:
    """A file on an ext4: the file system of the guest's root keeps no page cache."""
    with small_disk(tmp_path, FILE_MIB + 32, "-b", "4096") as point:
        (point / "input").write_bytes(os.urandom(MIB) * FILE_MIB)
        os.sync()
        yield point / "input"


@on_ublk
def test_files_go_before_memory_under_version_2(
    frontend: str, runner: Runner, input_file: Path
) -> None:
    """Version 2 has no swappiness, so the agent reclaims files ahead of need."""
    process = runner.popen(
        *read(input_file, FOREVER, JOB_MIB),
        options=(*FAR, "--frontend", frontend),
        local=f"{LOCAL_MIB}M",
        stdin=subprocess.PIPE,
    )
    check_rounds(process, 0, 1)
    cgroup = runner.cgroup(process).path
    events = parse_key_values((cgroup / "memory.events").read_text())
    assert events["max"] < 50, events  # by the kernel alone: hundreds
    stat = parse_key_values((cgroup / "memory.stat").read_text())
    assert stat["workingset_refault_anon"] < 50
    assert int((cgroup / "memory.swap.current").read_text()) < MIB
    assert runner.status["far"]["used_bytes"] > 0
    stop(process)
    runner.nothing_left()


@pytest.mark.full  # as long as the one above
@on_ublk
def test_memory_high_of_version_2_bounds_what_is_at_home(frontend: str, runner: Runner) -> None:
    """Above it the kernel slows the job and swaps, so the agent stays below."""
    path = runner.cluster.root / "summary.json"
    process = runner.popen(
        *("sh", "-c", WAITS, "sh", *fill(FOREVER, JOB_MIB)),
        options=(*FAR, "--frontend", frontend, "--summary-json", str(path)),
        local=f"{ROOMY_MIB}M",
        stdin=subprocess.PIPE,
    )
    ready(process)
    cgroup = runner.cgroup(process).path
    assert (cgroup / "memory.max").read_text() == f"{ROOMY_MIB * MIB}\n"
    assert (cgroup / "memory.high").read_text() == "max\n"
    (cgroup / "memory.high").write_text(f"{HIGH_MIB}M")
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    check_rounds(process, 0)
    events = parse_key_values((cgroup / "memory.events").read_text())
    assert (events["max"], events["oom"], events["oom_kill"]) == (0, 0, 0)
    stop(process)
    summary = json.loads(path.read_text())
    path.unlink()
    assert summary["far"]["peak_bytes"] > (JOB_MIB - HIGH_MIB) * MIB
    assert summary["swap_peak_bytes"] < 8 * MIB
    runner.nothing_left()


@pytest.fixture
def strict() -> Iterator[Callable[[], int]]:
    """A function that makes the kernel refuse to overcommit memory."""
    mode = Path("/proc/sys/vm/overcommit_memory")
    before = mode.read_text()
    try:
        yield lambda: mode.write_text("2")
    finally:
        mode.write_text(before)


@pytest.mark.full
@on_ublk
def test_without_overcommit_far_memory_is_refused(
    frontend: str, runner: Runner, strict: Callable[[], int]
) -> None:
    """A run is refused; a program that starts later in a job runs with swap alone."""
    path = runner.cluster.root / "summary.json"
    options = (*FAR, "--frontend", frontend, "--summary-json", str(path))
    process = runner.popen(
        *("sh", "-c", WAITS, "sh", *fill(1, JOB_MIB)),
        options=options,
        local=f"{LOCAL_MIB}M",
        stdin=subprocess.PIPE,
    )
    ready(process)
    strict()
    _, stderr = process.communicate(b"go\n", timeout=600)
    assert process.returncode == 0, stderr.decode()
    summary = json.loads(path.read_text())
    path.unlink()
    assert (summary["far"]["never"], summary["far"]["peak_bytes"]) == ({"addresses": 1}, 0)
    assert summary["swap_peak_bytes"] > (JOB_MIB - LOCAL_MIB) * MIB
    done = runner("echo", "ran", options=options, local=f"{LOCAL_MIB}M")
    assert (done.returncode, done.stdout) == (5, b"")
    assert b"vm.overcommit_memory=0" in done.stderr
    runner.nothing_left()


@pytest.mark.kernels("6.1")
def test_an_old_kernel_is_an_error_that_names_the_kernels_that_can(
    module_cluster: Cluster,
) -> None:
    options = ("--local", "64M", "--donors", module_cluster.addresses, *FAR)
    done = module_cluster.cli("run", *options, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (5, "")
    why = "Linux 6.1 cannot move pages within a process"
    assert f"--paging far is not possible here: {why}" in done.stderr
    assert "Use Linux 6.12.43" in done.stderr
    assert "run it with --paging swap" in done.stderr
    assert module_cluster.leftovers() == []
    findings = json.loads(module_cluster.cli("doctor", "--json").stdout)
    (found,) = [one for one in findings if one["name"] == "far-memory"]
    assert found["what"].startswith(f"jobs can use swap alone: {why}")
