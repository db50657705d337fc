# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run --dry-run`: says what a run does, ends as it would, and leaves nothing."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import NEEDS_SWAP, until
from support.jobs.runs import Runner

from infiniswap.system import loop, swap
from infiniswap.system.files import try_read_text
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.units import MIB

pytestmark = NEEDS_SWAP

NOBODY = "nobody"


def host_state(runner: Runner) -> dict[str, Any]:
    """Everything that a run makes, as it is now. (Others may mount things on this machine.)"""
    root = runner.cluster.root
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    modules = (try_read_text(Path("/proc/modules")) or "").splitlines()
    return {
        "mounts": [line for line in mounts if str(root) in line],
        "modules": sorted(line.split()[0] for line in modules),
        "loops": sorted(str(device.path) for device in loop.attached()),
        "swap": [area.path for area in swap.active_areas()],
        "cgroups": [cgroup.name for cgroup in find_job_cgroups()],
        "links": sorted(os.listdir("/dev/infiniswap")) if Path("/dev/infiniswap").exists() else [],
        "files": sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if not path.relative_to(root).parts[0].endswith((".log", "donors"))
        ),
        "processes": sorted(runner.cluster.processes()),
        "leases": [
            runner.cluster.donor_row(donor)["status"]["leases"] for donor in runner.cluster.donors
        ],
    }


def dry(
    runner: Runner, *command: str, options: tuple[str, ...] = (), **more: Any
) -> subprocess.CompletedProcess[bytes]:
    return runner(*command, options=("--dry-run", *options), **more)


def plan(runner: Runner, *command: str, options: tuple[str, ...] = (), **more: Any) -> Any:
    done = dry(runner, *command, options=("--json", *options), **more)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_a_dry_run_leaves_nothing_and_says_what_the_run_then_does(runner: Runner) -> None:
    before = host_state(runner)
    options = ("--size", "100M", "--tenant", "physics")
    found = plan(runner, "sleep", "60", options=options)
    said = dry(runner, "sleep", "60", options=options).stdout.decode()
    after = host_state(runner)
    for what, was in before.items():
        assert after[what] == was, what

    device = found["device"]
    process = runner.popen("sleep", "60", options=options)
    until(lambda: "run" in runner.cluster.names() and runner.cgroup(process), "the job")
    status = runner.status
    assert device["name"] == status["name"] == "run"
    assert device["size_bytes"] == status["size_bytes"] == 100 * MIB
    assert device["slab_bytes"] == status["slab_bytes"]
    assert device["slabs"] == sum(status["slabs"].values())
    assert device["priority"] == status["swap"]["priority"]
    assert device["frontend"] == status["frontend"]
    assert device["backup"] == status["backup"]
    assert device["sealed"] == status["sealed"]
    assert device["backup_free_bytes"] > device["backup_needs_bytes"] == 100 * MIB
    cgroup = runner.cgroup(process)
    assert found["job"]["cgroup_version"] == cgroup.version
    donors = {donor["address"]: donor for donor in found["donors"]}
    assert donors.keys() == {row["address"] for row in status["donors"]}
    assert all(donor["slabs"] > 0 and donor["name"] for donor in donors.values())
    assert found["told"] == {"job": "sleep", "user": "root", "tenant": "physics"}

    for text in ("100 MiB", device["backup"], *donors, "tenant physics", "nothing is left behind"):
        assert text in said, text
    process.terminate()
    process.wait()


def test_the_chosen_size_is_that_of_the_run(runner: Runner) -> None:
    device = plan(runner, "true")["device"]
    done = runner("true")
    assert device["size_why"]
    assert f"device size {device['size_bytes'] // MIB} MiB: {device['size_why']}" in (
        done.stderr.decode()
    )


CLOSED = ("--donors", "127.0.0.1:1")
ONE_SIZE = ("--size", "64M")
FAILURES: tuple[tuple[str, ...], ...] = (
    (*ONE_SIZE, *CLOSED),
    (*ONE_SIZE, "--backup", "/dev/shm/infiniswap-dry"),
    (*ONE_SIZE, "--backup", "none"),
    (*ONE_SIZE, "--slab", "2M"),
)
MORE_FAILURES: tuple[tuple[str, ...], ...] = (
    CLOSED,
    ("--size", "1P", "--slab", "64G"),
    ("--size", "900T"),
    ("--size", "2G", "--backup", "none", "--allow-data-loss"),
    (*ONE_SIZE, "--secret-file", "/etc/passwd"),
    (*ONE_SIZE, "--transport", "rdma"),
    (*ONE_SIZE, "--tenant", "a\nb"),
    (*ONE_SIZE, "--summary-json", "/no/such/directory/x"),
    (*ONE_SIZE, "--summary-json", "/proc"),
    ("--device", "nobody-has-it"),
)


@pytest.mark.parametrize(
    "failures", [FAILURES, pytest.param(MORE_FAILURES, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_what_would_fail_fails_in_the_same_way_and_makes_nothing(
    runner: Runner, failures: tuple[tuple[str, ...], ...]
) -> None:
    before = host_state(runner)
    rehearsed = [dry(runner, "sleep", "0", options=options) for options in failures]
    assert host_state(runner) == before
    for options, said in zip(failures, rehearsed, strict=True):
        real = runner("sleep", "0", options=options)
        assert real.returncode != 0, options
        assert said.returncode == real.returncode, (options, said, real)
        # The last line is the error; a real start may have said something before it.
        assert said.stderr.splitlines()[-1] == real.stderr.splitlines()[-1], options
        assert not said.stdout


def test_a_command_that_is_not_there_is_found_out(runner: Runner) -> None:
    assert dry(runner, "no-such-command").returncode == 127


def test_json_belongs_to_a_dry_run(runner: Runner) -> None:
    done = runner("true", options=("--json",))
    assert done.returncode == 2
    assert b"--dry-run" in done.stderr


def test_the_user_is_told_under_sudo_and_need_not_be(runner: Runner) -> None:
    uid = str(pwd.getpwnam(NOBODY).pw_uid)
    env = {**runner.cluster.env, "SUDO_UID": uid}
    told = plan(runner, "/bin/sleep", "60", options=("--size", "64M"), env=env)["told"]
    assert told == {"job": "sleep", "user": NOBODY, "tenant": ""}
    env["INFINISWAP_DEVICE_TELL_USER"] = "false"
    told = plan(runner, "/bin/sleep", "60", options=("--size", "64M"), env=env)["told"]
    assert told == {"job": "", "user": "", "tenant": ""}


def test_a_run_on_a_declared_device(device_runner: Runner) -> None:
    before = device_runner.status["runs"]
    found = plan(device_runner, "true")
    status = device_runner.status
    assert status["runs"] == before
    assert found["device"]["joined"]
    assert found["device"]["name"] == status["name"]
    assert found["device"]["priority"] == status["swap"]["priority"]
    assert found["told"] is None
    assert "which runs" in dry(device_runner, "true").stdout.decode()
