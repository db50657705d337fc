# SPDX-License-Identifier: Apache-2.0
"""`infiniswap demo` as a user runs it, and what is left when it is ended in the middle."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, until

from infiniswap.demo import data, leftovers
from infiniswap.demo.leftovers import PREFIX, RUN_DIR, WORK_DIR
from infiniswap.demo.results import DISK, FAR, INFINISWAP, UNLIMITED
from infiniswap.device.spec.rundir import running_names
from infiniswap.errors import ConflictError
from infiniswap.system import loop, swap
from infiniswap.system.memory import memory_hierarchy
from infiniswap.system.throttle import blkio_root
from infiniswap.system.userfault import far_refusal
from infiniswap.units import GIB, MIB

pytestmark = [*NEEDS_SWAP, pytest.mark.requires_tool("setpriv")]
if importlib.util.find_spec("pandas") is None or data.generator() is None:
    pytest.skip("needs the demo extra", allow_module_level=True)

WAIT_S = 240.0
NEEDS_FAR = (
    pytest.mark.full,
    pytest.mark.skipif(far_refusal() is not None, reason=f"needs far memory: {far_refusal()}"),
)
SMALL = """
from infiniswap.demo import runner
runner.run(runner.Options(scale="0.2"))
"""
"""A demo of a quarter of the size, half of whose memory is enough for far memory. It is below the
floors, which only the command checks."""


LINES = {
    UNLIMITED: ": as much memory as it wants",
    INFINISWAP: ": infiniswap run --local",
    FAR: ": infiniswap run --paging far",
    DISK: " of memory, swap on ",
}
"""In the line that announces a leg."""


def demo_processes() -> list[str]:
    """Command lines of all that a demo starts, of which each names its work directory."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if PREFIX in line and int(directory.name) != os.getpid():
                found.append(line)
    return found


def demo_loops() -> list[loop.LoopDevice]:
    """The volume, what lies on it, and the demo's device."""
    attached = loop.attached()
    paths = {str(device.path) for device in attached if f"/{PREFIX}" in device.backing}
    return [
        device
        for device in attached
        if f"/{PREFIX}" in device.backing
        or device.backing.startswith(str(RUN_DIR))
        or device.backing in paths
    ]


def left() -> dict[str, object]:
    """All that a demo has made and not taken away; empty values only when there is nothing."""
    return {
        "loops": demo_loops(),
        "cgroups": list(memory_hierarchy().mount_point.glob(PREFIX + "*")),
        "directories": list(WORK_DIR.glob(PREFIX + "*")),
        "run": RUN_DIR.exists(),
        "processes": demo_processes(),
        "devices": running_names(RUN_DIR / "devices"),
    }


def host_state() -> set[str]:
    """What names nobody, so that it can only be compared: limits of devices."""
    root = blkio_root()
    files = [] if root is None else sorted(root.glob("blkio.throttle.*_device"))
    return {f"{path.name} {line}" for path in files for line in path.read_text().splitlines()}


def assert_nothing_left(before: set[str]) -> None:
    assert not any(left().values()), left()
    # Somebody else's may come and go.
    until(lambda: host_state() <= before, "the host as before", 30.0)


def sweep_stale() -> bool:
    """Removes what a killed demo has left; False where one is running."""
    try:
        with leftovers.only_one():
            for record in leftovers.stale():
                leftovers.sweep(record)
    except ConflictError:
        return False
    return True


@pytest.fixture
def host_before() -> Iterator[set[str]]:
    """The host's state before the demo. Waits for a demo that somebody else runs here, and sweeps
    what a killed one or a failed test leaves."""
    until(sweep_stale, "the end of somebody else's demo", WAIT_S)
    assert not any(left().values()), left()
    yield host_state()
    sweep_stale()


@pytest.mark.timeout(1500)
def test_the_demo_shows_what_it_promises(tmp_path: Path, host_before: set[str]) -> None:
    areas_before = {area.path for area in swap.active_areas()}
    report = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "infiniswap", "demo", "--json", str(report)],
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["ok"] is True
    by_name = {leg["name"]: leg for leg in found["legs"]}
    unlimited, paged, disk = (by_name[name] for name in (UNLIMITED, INFINISWAP, DISK))
    assert unlimited["anon_peak_bytes"] >= 768 * MIB
    assert paged["limit_bytes"] <= unlimited["anon_peak_bytes"] // 2 + MIB
    assert (FAR in by_name) == (found["no_far"] == "") == (far_refusal() is None)
    for leg in found["legs"][1:]:
        assert leg["limit_bytes"] == paged["limit_bytes"]
        assert leg["output"] == unlimited["output"]
    assert min(paged["page_in_bytes"], paged["page_out_bytes"]) >= GIB // 4
    assert len(unlimited["output"]) == 3
    served = sum(donor["read_bytes"] for donor in found["donors"])
    assert served >= 0.8 * paged["page_in_bytes"] - paged["page_in_chosen_bytes"]
    assert all(donor["write_bytes"] > 0 for donor in found["donors"])
    assert disk["page_in_bytes"] > 0
    assert disk["page_out_bytes"] > 0
    if blkio_root() is not None:
        assert found["throttle"] == ""
    if FAR in by_name:
        far = by_name[FAR]
        assert GIB // 4 <= far["far_out_bytes"] <= far["page_out_bytes"]
    assert f"All {len(by_name)} outputs are identical." in done.stdout
    assert {area.path for area in swap.active_areas()} - areas_before == set()
    assert_nothing_left(host_before)


def leg_runs(leg: str) -> bool:
    """Whether the job of this leg has its memory limit by now."""
    top = memory_hierarchy().mount_point
    if leg in (INFINISWAP, FAR):
        own = [line for line in demo_processes() if "job.py" in line and " run " not in line]
        return bool(running_names(RUN_DIR / "devices")) and bool(own)
    return any((path / "cgroup.procs").read_text() for path in top.glob(f"{PREFIX}*-{leg}"))


def start_small(leg: str, log: Path) -> subprocess.Popen[bytes]:
    """Starts a small demo and returns when it is in the middle of this leg."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SMALL], stdout=output, stderr=subprocess.STDOUT
        )
    line = LINES[leg]

    def reached() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            return line in log.read_text() and leg_runs(leg)
        return False

    try:
        until(reached, f"the {leg} leg", WAIT_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("leg", "number"),
    [
        (INFINISWAP, signal.SIGINT),
        pytest.param(UNLIMITED, signal.SIGHUP, marks=pytest.mark.full),
        pytest.param(FAR, signal.SIGINT, marks=NEEDS_FAR),
        pytest.param(DISK, signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_demo_that_is_interrupted_leaves_nothing(
    tmp_path: Path, host_before: set[str], leg: str, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    process = start_small(leg, log)
    process.send_signal(number)
    assert process.wait(WAIT_S) == 128 + number, log.read_text()
    assert "interrupted" in log.read_text()
    assert_nothing_left(host_before)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "leg",
    [
        INFINISWAP,
        pytest.param(FAR, marks=NEEDS_FAR),
        pytest.param(DISK, marks=pytest.mark.full),
    ],
)
def test_what_a_killed_demo_left_is_removed_by_the_next(
    tmp_path: Path, host_before: set[str], leg: str
) -> None:
    process = start_small(leg, tmp_path / "log")
    process.kill()
    process.wait()
    assert any(left().values())
    # The next one, interrupted as soon as it has begun.
    log = tmp_path / "next"
    again = start_small(UNLIMITED, log)
    assert "removing what an earlier demo left behind" in log.read_text()
    again.send_signal(signal.SIGINT)
    assert again.wait(WAIT_S) == 128 + signal.SIGINT, log.read_text()
    assert_nothing_left(host_before)


@pytest.mark.timeout(1200)
def test_a_demo_that_nobody_reads_any_more_leaves_nothing(host_before: set[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(WAIT_S) != 0
    assert_nothing_left(host_before)
