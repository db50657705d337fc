# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run` on cgroup version 2 without systemd: by root, by a member, by somebody else.

With systemd: test_services.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.devices.cluster import Cluster
from support.jobs.runs import Runner
from support.jobs.runwatch import GROUP, as_user, check, make_user, run_argv, watch

from infiniswap.device.spec.rundir import paths_of

MEMBER, STRANGER = "isw-alice", "isw-bob"


@pytest.fixture
def program(module_cluster: Cluster, pagecheck: Path) -> Path:
    """The job, where every user can execute it."""
    module_cluster.root.chmod(0o755)
    return Path(shutil.copy(pagecheck, module_cluster.root))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("frontend", ["ublk"], indirect=True)
def test_a_job_of_roots_with_a_device_of_its_own(
    frontend: str, runner: Runner, program: Path
) -> None:
    cluster = runner.cluster
    own = ("--donors", cluster.addresses, "--size", "64M", "--frontend", frontend)
    paths = paths_of("run", cluster.run_dir, cluster.backup_dir)
    seen = watch(runner.start(run_argv(program, *own)), paths)
    check(seen, uid=0)
    assert seen["frontend"] == frontend
    assert seen["cgroup"].startswith("/sys/fs/cgroup/infiniswap-run-")
    assert "(donors " in seen["said"], seen


@pytest.mark.full
@pytest.mark.requires_tool("setpriv")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("frontend", ["ublk"], indirect=True)
def test_a_member_uses_a_declared_device_and_a_stranger_is_told_how_to_become_one(
    frontend: str, runner: Runner, program: Path
) -> None:
    cluster = runner.cluster
    uid = make_user(MEMBER, GROUP)
    make_user(STRANGER)
    runner.device = device = cluster.start("--frontend", frontend, "--swap", size="64M")
    paths = paths_of(device.name, cluster.run_dir, cluster.backup_dir)
    try:
        command = run_argv(program, "--device", device.name)
        seen = watch(runner.start([*as_user(MEMBER), *command]), paths)
        check(seen, uid=uid)
        assert seen["cgroup"].startswith("/sys/fs/cgroup/infiniswap-run-")

        stranger = runner.start([*as_user(STRANGER), *command])
        stdout, stderr = stranger.communicate()
        assert (stranger.returncode, stdout) == (4, b""), stderr.decode()
        assert f"usermod -aG {GROUP} {STRANGER}" in stderr.decode()

        runner.nothing_left()
        assert device.status["state"] == "serving"
    finally:
        runner.end()
        runner.device = None
        device.remove()
