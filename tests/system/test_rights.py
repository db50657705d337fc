# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of the rights of processes that nobody's service manager has bounded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, PROGRAM, WAIT_S, Cluster, Device
from support.jobs.runs import Runner, ready
from support.machine.mount_space import changed_mounts

from infiniswap import rights
from infiniswap.errors import BackupError, NotPermittedError
from infiniswap.system.service_units import capabilities_here
from infiniswap.units import MIB

pytestmark = NEEDS_SWAP

UID = 65534
"""Of another user."""

_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_OURS_WITHOUT_RESOURCE = ("CAP_IPC_LOCK", "CAP_SYS_NICE")


def rights_of(pid: int | str) -> dict[str, str]:
    """Of every thread of a process, which have to have the same."""
    found: list[dict[str, str]] = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = (line.partition(":\t")[::2] for line in path.read_text().splitlines())
        found.append({key: text for key, text in lines if key in (*_SETS, "NoNewPrivs")})
    assert all(one == found[0] for one in found), found
    return found[0]


def bounded() -> int:
    """What a device may have at most, as far as this very process has it."""
    names = capabilities_here()
    if not rights.has("CAP_SYS_RESOURCE"):  # limits cannot be raised in its place
        names += _OURS_WITHOUT_RESOURCE
    own = int(rights_of(os.getpid())["CapPrm"], 16)
    return sum(1 << rights.CAPABILITIES[name] for name in names) & own


def check(device: Device) -> None:
    """Holder, active process and standby."""
    wanted = bounded()
    for name, pid in device.processes().items():
        seen = rights_of(pid)
        assert seen["NoNewPrivs"] == "1", name
        for which in ("CapPrm", "CapEff", "CapBnd"):
            assert int(seen[which], 16) == wanted, (name, which, seen)
        assert int(seen["CapInh"], 16) == int(seen["CapAmb"], 16) == 0, name


@pytest.fixture
def swapping(cluster: Cluster) -> Iterator[Device]:
    """A swap device over fuse, started by a shell."""
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    device = cluster.start("--frontend", "fuse", "--swap")
    yield device
    device.stop()


def test_a_device_has_the_units_capabilities_and_so_has_its_successor(swapping: Device) -> None:
    check(swapping)
    os.kill(swapping.processes()["active"], signal.SIGKILL)
    swapping.wait_take_over(1)
    assert swapping.status["swap"]["active"]
    check(swapping)
    # What it may not do is no harm to what it has to do.
    degraded = {text.partition(":")[0] for text in swapping.status["degraded"]} - {"keep-awake"}
    if rights.has("CAP_SYS_RESOURCE"):
        assert not degraded
    else:
        assert degraded <= {"oom-score", "io-flusher"}


@pytest.fixture
def fewer(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster on a host without memory cgroups, where a device needs no CAP_DAC_OVERRIDE."""
    cluster.donor()
    with changed_mounts("umount --recursive --lazy /sys/fs/cgroup") as command:
        cluster.program = (*command, *PROGRAM)
        yield cluster
        for name in cluster.names():
            cluster.ok("device", "remove", name)
        cluster.program = PROGRAM


def test_a_backup_that_needs_a_right_which_a_device_lacks_is_refused(fewer: Cluster) -> None:
    fewer.backup_dir.mkdir(mode=0o700)
    os.chown(fewer.backup_dir, UID, UID)
    (fewer.root / "empty.toml").touch()
    checks = (("config", "check", str(fewer.root / "empty.toml")), ("doctor",))
    for check in checks:
        done = fewer.cli(*check)
        assert done.returncode, check
        assert f"user {UID} owns" in " ".join((done.stdout + done.stderr).split()), check
    start = ("device", "start", fewer.name(), "--donors", fewer.addresses, "--size", "64M")
    for directory, why in (
        (fewer.backup_dir, f"belongs to another user ({UID})"),
        (fewer.backup_dir / "more", "not all of root's rights"),
    ):
        changes = {"INFINISWAP_DEVICE_BACKUP_DIR": str(directory)}
        done = fewer.cli(*start, "--frontend", "fuse", **changes)
        assert done.returncode == NotPermittedError.exit_code
        assert why in done.stderr
    elsewhere = {"INFINISWAP_DEVICE_BACKUP_DIR": str(fewer.root / "elsewhere")}
    backup = str(fewer.backup_dir / "file")
    done = fewer.cli(*start, "--frontend", "fuse", "--backup", backup, **elsewhere)
    assert done.returncode == BackupError.exit_code
    assert f"user {UID} owns" in done.stderr
    assert not fewer.leftovers()
    assert not list(fewer.backup_dir.iterdir())
    os.chown(fewer.backup_dir, 0, 0)
    for check in checks:
        assert str(fewer.backup_dir) not in fewer.cli(*check).stderr
    device = fewer.start("--frontend", "fuse", size="64M")
    assert (
        not int(rights_of(device.pid)["CapEff"], 16) >> rights.CAPABILITIES["CAP_DAC_OVERRIDE"] & 1
    )
    assert device.backup.stat().st_size >= 64 * MIB
    device.path.write_bytes(os.urandom(MIB))


def check_job(runner: Runner, *options: str) -> None:
    """It has the rights of its run, which has all of its caller's."""
    before = rights_of(os.getpid())
    script = "echo ready; read line"
    with contextlib.closing(runner):
        process = runner.popen("sh", "-c", script, options=options, stdin=subprocess.PIPE)
        ready(process)
        pids = runner.cgroup(process).pids()
        assert pids
        assert [rights_of(pid) for pid in (process.pid, *pids)] == [before] * (1 + len(pids))
        assert runner.status["swap"]["active"]
        assert runner.status["runs"] == [process.pid]
        process.communicate(b"\n", timeout=2 * WAIT_S)
        assert process.returncode == 0


def test_a_job_keeps_the_rights_of_its_run(runner: Runner) -> None:
    """Else sudo would do nothing in it. The same process has started the run's own device."""
    check_job(runner, "--size", "64M")


def test_a_job_on_a_declared_device_keeps_them_too(device_runner: Runner) -> None:
    check_job(device_runner)
