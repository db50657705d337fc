# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan` on cgroup version 2: by root, and by a member on a declared device. Version 1:
tests/system/test_plan.py, test_run_member.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.jobs.plans import plan_in, second_long
from support.jobs.runs import Runner, touch
from support.jobs.runwatch import GROUP, as_user, make_user

from infiniswap.units import MIB

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.full,
    pytest.mark.parametrize("frontend", ["ublk"], indirect=True),
]

JOB = second_long(["/usr/bin/python3", *touch(64, 4)[1:]])
MEMBER = "isw-alice"


def planned(runner: Runner, argv: list[str]) -> Any:
    """Runs a plan to its end; its JSON."""
    process = runner.start(argv)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    found = plan_in(stdout.decode())
    assert 64 * MIB < found["peak_bytes"] < 96 * MIB
    assert found["probe_page_ins"] > 0
    assert found["curve"][-1]["page_ins"] > 0
    assert found["recommended"]["limit_bytes"] > 0
    return found


def command(*options: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "infiniswap", "plan", "--json", *options, "--", *JOB]


def test_a_plan_of_roots_sees_which_pages_come_back(frontend: str, runner: Runner) -> None:
    own = ("--donors", runner.cluster.addresses, "--size", "256M", "--frontend", frontend)
    found = planned(runner, command(*own))
    assert not any("pages cannot be seen" in note for note in found["notes"])


@pytest.mark.requires_tool("setpriv")
def test_a_plan_of_a_members_uses_a_declared_device(frontend: str, runner: Runner) -> None:
    cluster = runner.cluster
    make_user(MEMBER, GROUP)
    cluster.root.chmod(0o755)
    runner.device = device = cluster.start("--frontend", frontend, "--swap", size="128M")
    try:
        argv = [*as_user(MEMBER), *command("--device", device.name)]
        found = planned(runner, argv)
        assert any("pages cannot be seen" in note for note in found["notes"])
        runner.nothing_left()
    finally:
        runner.end()
        runner.device = None
        device.remove()
