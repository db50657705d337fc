# SPDX-License-Identifier: Apache-2.0
"""README's section "Two machines", word for word, on two hosts in network namespaces.

The commands are those of its code blocks, run by a shell as they stand. Changed are only what the
section declares as the reader's own (the address, the secret's path, LOCAL and MIB), and sizes and
directories through documented `INFINISWAP_*` variables. `sudo` and `ssh` are stand-ins: both hosts
share one file system here, and the test is root already.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, until
from support.documents import marked
from support.donors.donor_world import SECRET
from support.machine.usershell import BESIDE, Service, bash, search_path

from infiniswap.system.netns import NetworkNamespaces
from infiniswap.system.programs import run_command
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_root,
    pytest.mark.requires_netns,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
    pytest.mark.requires_memcg,
    pytest.mark.requires_swap,
    pytest.mark.requires_tool("ip", "nsenter", "bash", "base64", "install"),
]

ADDRESS = "10.0.0.2"
"""The donor's address in the README."""
LOCAL = 48 * MIB
WANTED_MIB = 128


def blocks(kind: str, name: str) -> list[str]:
    """Bodies of the section's code blocks that are marked so."""
    return [block.body for block in marked(Path("README.md"), kind, name)]


class Machines:
    """Two hosts, a shell on each; the donor lends, as its block says.

    Attributes:
        net: the namespaces.
        cluster: directories, environment and clean-up of the consumer's device.
        daemon: the donor's, the last command of that block.
    """

    def __init__(self, net: NetworkNamespaces, cluster: Cluster) -> None:
        self.net = net
        self.cluster = cluster
        self.address = net.address("donor")
        self.environment = {
            **cluster.env,
            "PATH": search_path(cluster.root / "bin", BESIDE),
            "INFINISWAP_DAEMON_SLAB": cluster.env["INFINISWAP_DEVICE_SLAB"],
            "INFINISWAP_DAEMON_POOL": "512M",
            "INFINISWAP_DAEMON_HEADROOM": "16M",
        }
        lend = blocks("on", "donor")[0]
        assert re.search(r"^sudo infiniswap daemon .*\n\Z", lend, re.MULTILINE)
        self.daemon = Service(
            self.script("donor", lend),
            cluster.root / "daemon.log",
            f"control {self.address}:9400, pages {self.address}:9401",
            self.environment,
            cluster.root,
        )

    def secret(self, host: str) -> Path:
        """Where a host keeps the secret."""
        return self.cluster.root / host / "secret"

    def own(self, text: str, host: str, **values: str) -> str:
        """The text with the reader's own values in the assignments that the section makes."""
        values = {"DONOR": self.address, "SECRET": str(self.secret(host)), **values}
        for name, value in values.items():
            text = re.sub(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        return text

    def script(self, host: str, commands: str, **values: str) -> list[str]:
        """The command that runs them in a shell of that host, after what is said on both."""
        text = self.own(blocks("on", "both")[0] + commands, host, **values)
        return self.net.command(host, bash(text))

    def run(self, host: str, commands: str, **values: str) -> subprocess.CompletedProcess[str]:
        """Runs commands of the section on a host."""
        return subprocess.run(
            self.script(host, commands, **values),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S * 2,
            check=False,
        )

    def prepare_consumer(self) -> None:
        """The consumer's first block: secret, and a look at the donor."""
        done = self.run("consumer", blocks("on", "consumer")[0])
        assert done.returncode == 0, done.stderr
        assert "serving" in done.stdout

    def job(self, **values: str) -> subprocess.CompletedProcess[str]:
        """The consumer's second block: the program."""
        small = {"LOCAL": str(LOCAL), "MIB": str(WANTED_MIB)}
        return self.run("consumer", blocks("on", "consumer")[1], **{**small, **values})

    def firewall(self, action: str, port: int) -> None:
        """The donor's: with "add" nothing that its port answers goes out, so nobody gets in;
        until "del"."""
        rule = ["ip", "rule", action, "ipproto", "tcp", "sport", str(port), "blackhole"]
        run_command(self.net.command("donor", rule))

    def counters(self) -> dict[str, int]:
        """The donor's own counters."""
        command = "sudo infiniswap status --json --donors $DONOR --secret-file $SECRET\n"
        done = self.run("consumer", command)
        assert done.returncode == 0, done.stderr
        counters: dict[str, int] = json.loads(done.stdout)["donors"][0]["status"]["counters"]
        return counters

    def message(self, name: str) -> str:
        """What the README says will be printed."""
        return blocks("message", name)[0].strip().replace(ADDRESS, self.address)

    def expect(self, done: subprocess.CompletedProcess[str], message: str, code: int) -> None:
        """It failed with the README's message and that exit code, and left nothing behind."""
        assert message in done.stderr.splitlines(), done.stderr
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert self.cluster.leftovers() == self._daemon_itself()

    def _daemon_itself(self) -> list[str]:
        """Its processes, and where its slabs lie (docs/adr/0015)."""
        own = re.compile(rf" (daemon|bash) |^mount {re.escape(str(self.cluster.root))}/donors/")
        return [text for text in self.cluster.leftovers() if own.search(text)]


@pytest.fixture
def machines(cluster: Cluster) -> Iterator[Machines]:
    with NetworkNamespaces(["donor", "consumer"]) as net:
        made = Machines(net, cluster)
        try:
            made.prepare_consumer()
            yield made
        finally:
            made.daemon.end()


def test_the_section_as_it_stands(machines: Machines) -> None:
    assert machines.secret("donor").stat().st_mode & 0o777 == 0o600
    assert "plain TCP" in machines.daemon.log  # the warning of the start-up
    assert machines.secret("consumer").read_bytes() == machines.secret("donor").read_bytes()

    before = machines.counters()
    done = machines.job()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(WANTED_MIB * MIB)
    assert re.search(r"paged out .*, in .* \(donors \d", done.stderr), done.stderr
    after = machines.counters()
    # Out of what cannot stay, at least a part went there; and some of that came back from there.
    assert after["write_bytes"] - before["write_bytes"] > 16 * MIB
    assert after["read_bytes"] - before["read_bytes"] > MIB
    assert machines.cluster.leftovers() == machines._daemon_itself()


def test_a_wrong_address(machines: Machines) -> None:
    nobody = machines.address.rpartition(".")[0] + ".99"
    message = machines.message("control").replace(machines.address, nobody)
    machines.expect(machines.job(DONOR=nobody), message, 6)


def test_a_daemon_that_does_not_run(machines: Machines) -> None:
    machines.daemon.end()
    machines.expect(machines.job(), machines.message("refused"), 6)


@pytest.mark.parametrize(("port", "name"), [(9400, "control"), (9401, "data")])
def test_a_blocked_port(machines: Machines, port: int, name: str) -> None:
    machines.firewall("add", port)
    machines.expect(machines.job(), machines.message(name), 6)


def test_the_port_of_the_pages_instead_of_the_control_port(machines: Machines) -> None:
    machines.expect(machines.job(DONOR=f"{machines.address}:9401"), machines.message("port"), 7)


def test_a_wrong_secret(machines: Machines) -> None:
    machines.secret("consumer").write_text(SECRET)
    machines.expect(machines.job(), machines.message("secret"), 7)


STALLED_JOB = """
import pathlib, sys, time
data = bytearray(b"x") * (96 << 20)
pathlib.Path(sys.argv[1]).touch()
end_s = time.monotonic() + 200
while not pathlib.Path(sys.argv[2]).exists() and time.monotonic() < end_s:
    data.count(b"y")
    data[::4096] = b"x" * (96 << 8)
print(data.count(b"x"))
"""


def test_a_link_that_stalls_is_told_and_loses_nothing(machines: Machines) -> None:
    root = machines.cluster.root
    script, started, go_on = root / "job.py", root / "started", root / "go-on"
    script.write_text(STALLED_JOB)
    command = f"sudo infiniswap run --local {LOCAL} --donors $DONOR --secret-file $SECRET -- "
    command += f"python3 {script} {started} {go_on}\n"
    job = subprocess.Popen(
        machines.script("consumer", command),
        env=machines.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = machines.cluster.run_dir / "run" / "log"
    wanted = re.escape(machines.message("slow")).replace(r"1\ slabs", r"\d+\ slabs")
    try:
        until(started.exists, "the job to have its memory")
        machines.firewall("add", 9401)
        until(lambda: re.search(wanted, log.read_text()), "the message of a slow link")
        machines.firewall("del", 9401)
        go_on.touch()
        out, err = job.communicate(timeout=WAIT_S * 2)
    finally:
        go_on.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=WAIT_S)
        job.kill()
        job.wait(WAIT_S)
    assert (job.returncode, out.strip()) == (0, str(96 * MIB)), err
