# SPDX-License-Identifier: Apache-2.0
"""README's six commands, as they stand, from fresh systems to a job whose memory is a neighbour's.

Two systems without a compiler, each with a network of its own; nothing is configured but by these
commands.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, until
from support.documents import blocks, marked
from support.machine.fresh_systems import FreshSystem, fresh_system
from support.machine.ran import ran
from support.machine.usershell import Service, bash, join_command
from support.machine.wheels import copy_checkout, make_in

from infiniswap.system.netns import NetworkNamespaces
from infiniswap.units import MIB

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.full,
    pytest.mark.requires_netns,
    pytest.mark.requires_tool("debootstrap", "dpkg-deb", "make", "cmake", "cc", "nsenter", "ip"),
    pytest.mark.timeout(3600),
]

WANTED_MIB = 512
_MINUTES_S = 600.0


class Host:
    """A fresh system with a network.

    Args:
        net: of all hosts.
        name: of this one.
        system: of this one.
        logs: where what runs on writes.
    """

    def __init__(self, net: NetworkNamespaces, name: str, system: FreshSystem, logs: Path) -> None:
        self.net = net
        self.name = name
        self.system = system
        self.logs = logs

    def argv(self, commands: str) -> list[str]:
        return self.net.command(self.name, self.system.command(*bash(commands)))

    def type(self, commands: str) -> tuple[str, str]:
        """Commands that end; returns both outputs."""
        done = ran(*self.argv(commands), wait_s=_MINUTES_S)
        assert done.returncode == 0, f"{self.name}: {commands}\n{done.stdout}{done.stderr}"
        return done.stdout, done.stderr

    @contextlib.contextmanager
    def typed(self, commands: str, serving: str) -> Iterator[Service]:
        """A command that goes on until Ctrl-C."""
        log = self.logs / f"{self.name}-{commands.split()[2]}.log"
        service = Service(
            self.argv(commands), log, serving, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, self.logs
        )
        try:
            yield service
        finally:
            service.end()


@pytest.fixture
def hosts(project_root: Path, tmp_path: Path) -> Iterator[dict[str, Host]]:
    """Installed by the section's first command."""
    tree = copy_checkout(project_root, tmp_path / "tree")
    (deb,) = make_in(tree, "deb", "DEB_ARGS=--release 12").glob("*~deb12_amd64.deb")
    (install,) = [
        block.body.split("#")[0].strip()
        for block in blocks(Path("README.md"))
        if "apt install ./infiniswap_" in block.body
    ]
    with NetworkNamespaces(["donor", "consumer"]) as net, contextlib.ExitStack() as stack:
        made = {}
        for name in net.hosts:
            system = stack.enter_context(fresh_system("bookworm"))
            # What the commands and the job need, and every host has.
            system.ok("apt-get", "install", "--yes", "--no-install-recommends", "sudo", "python3")
            shutil.copy(deb, system.root / "root" / deb.name)
            system.ok("bash", "-ec", f"cd /root; {install.replace('install', 'install --yes')}")
            made[name] = Host(net, name, system, tmp_path)
        yield made


def test_six_commands_lead_from_fresh_systems_to_a_job_on_a_neighbour(
    hosts: dict[str, Host],
) -> None:
    donor, consumer = hosts["donor"], hosts["consumer"]
    invite, daemon = (block.body for block in marked(Path("README.md"), "on", "donor"))
    join, status, job = (block.body for block in marked(Path("README.md"), "on", "consumer"))

    with donor.typed(invite, "Waiting;") as inviting:
        consumer.type(join.replace("infiniswap join TOKEN", join_command(inviting.log)))
        until(lambda: "joined: " in inviting.log, "the inviting host to know it")
    with donor.typed(daemon, ":9400, pages "):
        assert "serving" in consumer.type(status)[0]
        out, err = consumer.type(job)
        assert out.strip() == str(WANTED_MIB * MIB)
        assert re.search(r"paged out .*, in .* \(donors \d", err), err
        told = json.loads(consumer.type("sudo infiniswap status --json")[0])
    counters = told["donors"][0]["status"]["counters"]
    assert counters["write_bytes"] > 64 * MIB
    assert counters["read_bytes"] > 64 * MIB
