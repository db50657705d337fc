# SPDX-License-Identifier: Apache-2.0
"""Devices that are started from a batch job's step or in a container: limits, freezing, killing.

Only here: a swap area whose process has too little memory hangs the whole host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, Device, until
from support.jobs.runs import Runner, touch

from infiniswap.system import swap
from infiniswap.system.cgroup import MemoryCgroup

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("frontend", ["ublk"], indirect=True),
]

TOP = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
CONTAINER = (
    'echo $$ > "$0/cgroup.procs"; exec unshare -mpfC --mount-proc sh -c \''
    "mount --make-rprivate /; umount -l /sys/fs/cgroup; "
    'mount -t cgroup2 none /sys/fs/cgroup; "$@"; code=$?; [ -z "$STAY" ] || read -r line; '
    'exit $code\' sh "$@"'
)
"""Process 1 of name spaces of its own, whose top cgroup is the one that it begins in."""
SCOPE_S = 90.0
"""How long systemd waits for a scope."""
HOG = "memory = b'x' * (600 << 20); print('not killed')"
"""More than the container and the swap area have. Not of zeros: where the swap area is full, Linux
6.12 gives up such pages when it splits a huge page."""


@pytest.fixture
def step() -> Iterator[MemoryCgroup]:
    """A cgroup such as a batch system makes."""
    path = TOP / f"step-{os.getpid()}"
    path.mkdir()
    cgroup = MemoryCgroup(path, 2)
    yield cgroup
    (path / "cgroup.freeze").write_text("0")
    cgroup.kill()
    cgroup.remove()


def inside(step: MemoryCgroup, *argv: str, how: str = ENTER) -> list[str]:
    return ["sh", "-c", how, str(step.path), *argv]


def start_command(cluster: Cluster, frontend: str, name: str) -> list[str]:
    options = ("--size", "64M", "--swap", "--frontend", frontend)
    return [*cluster.program, "device", "start", name, "--donors", cluster.addresses, *options]


@pytest.fixture
def standby(module_cluster: Cluster) -> Iterator[Cluster]:
    """Devices of this cluster have a standby."""
    module_cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    yield module_cluster
    module_cluster.env["INFINISWAP_DEVICE_STANDBY"] = "off"


def test_a_job_in_a_small_cgroup_ends_as_anywhere(
    frontend: str, runner: Runner, step: MemoryCgroup
) -> None:
    """128 MiB for `run` and all that it starts hung a host, when the device was among that."""
    step.set_limit(128 << 20)
    own = ("--size", "64M", "--frontend", frontend)
    process = runner.start(inside(step, *runner.argv(*touch(60, 2), options=own)))
    served = runner.cluster.run_dir / "run" / "control.sock"
    until(lambda: served.exists() or process.poll() is not None, "the device")
    pid = runner.status["pid"]
    assert Path(f"/proc/{pid}/cgroup").read_text() == "0::/\n"
    stdout, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr.decode()
    assert b"round 1" in stdout
    assert step.memory().oom_kills == 0
    runner.nothing_left()


def test_swap_is_off_after_a_steps_processes_were_killed(
    frontend: str, runner: Runner, step: MemoryCgroup
) -> None:
    own = ("--size", "64M", "--frontend", frontend)
    process = runner.start(inside(step, *runner.argv(*touch(60, 1000), options=own)))
    until(lambda: any(area.used_bytes for area in swap.active_areas()), "pages on the device")
    (step.path / "cgroup.kill").write_text("1")
    assert process.wait(60) == -signal.SIGKILL
    runner.nothing_left()
    assert swap.active_areas() == ()


def test_a_frozen_step_stops_no_device(
    frontend: str, standby: Cluster, step: MemoryCgroup, capfd: pytest.CaptureFixture[str]
) -> None:
    """And where the device's own cgroup is frozen, show and stop say so, and the stop is none."""
    name = standby.name()
    subprocess.run(
        inside(step, *start_command(standby, frontend, name)), env=standby.env, check=True
    )
    device = Device(standby, name)
    try:
        (step.path / "cgroup.freeze").write_text("1")
        pids = device.processes()
        assert device.status["state"] == "serving"
        (step.path / "cgroup.freeze").write_text("0")
        for pid in pids.values():
            step.add(pid)
        (step.path / "cgroup.freeze").write_text("1")
        until(lambda: "frozen 1" in (step.path / "cgroup.events").read_text(), "frozen")
        for action in ("show", "stop", "restart"):
            refused = device.command(action)
            assert refused.returncode == 9, refused.stderr
            assert f"its cgroup {step.path} is frozen" in refused.stderr
            assert f"echo 0 > {step.path}/cgroup.freeze" in refused.stderr
        assert json.loads(standby.ok("device", "list", "--json"))["frozen"] == [name]
        (step.path / "cgroup.freeze").write_text("0")
        assert device.status["state"] == "serving"
        assert any("not a cgroup for services" in said for said in device.status["degraded"])
    finally:
        (step.path / "cgroup.freeze").write_text("0")
        device.remove()
        capfd.readouterr()


def in_container(cluster: Cluster, step: MemoryCgroup, frontend: str) -> str:
    """What a start says that has to fail in a container, of which nothing is left."""
    command = inside(step, *start_command(cluster, frontend, cluster.name()), how=CONTAINER)
    done = subprocess.run(
        command, env=cluster.env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode in (5, 13), (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert swap.active_areas() == ()
    return done.stderr


def active_in(step: MemoryCgroup) -> int:
    """Pid of the device's process there; it knows itself by the container's number."""
    found = [pid for pid in step.pids() if command_of(pid).endswith((b"active", b"active\0"))]
    assert len(found) == 1, found
    return found[0]


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_container_too_small_for_a_standby_is_refused(
    frontend: str, standby: Cluster, step: MemoryCgroup
) -> None:
    step.set_limit(160 << 20)
    said = in_container(standby, step, frontend)
    needs = r"2 processes of the device need \d+ MiB of memory, and this cgroup may have 160 MiB"
    assert re.search(needs, said), said
    (step.path / "memory.max").write_text("max")
    (step.path / "pids.max").write_text("22")
    said = in_container(standby, step, frontend)
    assert re.search(r"need \d+ threads, and this cgroup may have 22", said), said


@pytest.mark.full  # a minute, for the start and the end of a device with a standby
def test_a_take_over_after_a_kill_for_memory_names_the_cgroup(
    frontend: str, standby: Cluster, step: MemoryCgroup
) -> None:
    step.set_limit(448 << 20)
    name = standby.name()
    process = subprocess.Popen(
        inside(step, *start_command(standby, frontend, name), how=CONTAINER),
        env={**standby.env, "STAY": "1"},
        stdin=subprocess.PIPE,
    )
    device = Device(standby, name)
    try:
        served = device.run / "control.sock"
        until(lambda: served.exists() or process.poll() is not None, "the device")
        assert process.poll() is None, "the container has ended"
        device.wait_standby()
        # The kernel kills no process that serves swap as long as there is another one.
        Path(f"/proc/{active_in(step)}/oom_score_adj").write_text("1000")
        hog = subprocess.Popen(inside(step, sys.executable, "-c", HOG))
        until(lambda: hog.poll() is not None, "the kernel to kill what takes too much memory")
        assert hog.returncode == -signal.SIGKILL
        status = device.wait_take_over(1)
        assert status["succession"]["reason"] == "killed"
        said = [line for line in status["degraded"] if "was killed by the kernel" in line]
        assert said, status["degraded"]
        assert "the memory limit of" in said[0]
        assert "(448 MiB)" in said[0]
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            device.remove()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(600)


@pytest.mark.full
@pytest.mark.requires_tool("busctl", "dbus-daemon", "systemd-run", "unshare")
def test_a_session_of_systemds_is_left_for_a_scope(frontend: str) -> None:
    """What a service starts stays in the service's own cgroup."""
    here = Path(__file__).parent
    boot = [sys.executable, str(here / "systemd_boot.py"), sys.executable]
    done = subprocess.run(
        [*boot, str(here / "surroundings_probe.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert (done.returncode, len(lines)) == (0, 1), done.stdout + done.stderr
    seen = json.loads(lines[0].removeprefix("SEEN "))
    assert seen["in_unit"]
    assert seen["service"].endswith("/isw-test.service")
    assert seen["own"] == "0::/user.slice/user-0.slice/session-9.scope"
    assert seen["limit"] == str(128 << 20)
    assert seen["left"] == "0::/system.slice/isw-probe.scope"


@pytest.mark.full
@pytest.mark.requires_tool("busctl", "dbus-daemon", "systemd-run", "unshare")
def test_a_shutdown_waits_for_programs_not_for_the_device(
    frontend: str, standby: Cluster, pagecheck: Path
) -> None:
    """systemd asks a device that was started by hand once, while its pages do not fit back."""
    name, here = standby.name(), Path(__file__).parent
    device, said, refused = Device(standby, name), standby.root / "said", ""
    boot = [sys.executable, str(here / "systemd_boot.py"), "--poweroff"]
    boot += [sys.executable, str(here / "poweroff_probe.py"), name, str(pagecheck), "48", "1", "0"]
    with said.open("w") as output:
        process = subprocess.Popen(
            [*boot, "--", *start_command(standby, frontend, name)],
            env=standby.env,
            stdout=output,
            stderr=output,
        )
        try:
            until(lambda: process.poll() is not None or "SERVES" in said.read_text(), "the job")
            while process.poll() is None:
                refused = device.log or refused  # gone with the device
                time.sleep(0.1)
            end_s = time.monotonic()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    assert process.returncode == 0, said.read_text()
    assert "does not fit back into memory" in refused
    assert refused.count("not stopped") == 1
    begin_s = float(said.read_text().partition("SERVES ")[2].split()[0])
    print(f"the shutdown took {end_s - begin_s:.1f} s")
    assert end_s - begin_s < SCOPE_S, said.read_text()
    assert swap.active_areas() == ()
