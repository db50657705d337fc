# SPDX-License-Identifier: Apache-2.0
"""README's section "Two hosts, six commands", word for word, on two hosts in network namespaces.

The messages are those of docs/troubleshooting.md.

The commands are those of its code blocks, run by a shell as they stand. Changed are only what the
section declares as the reader's own (TOKEN, LOCAL and MIB), and sizes and directories through
documented `INFINISWAP_*` variables. `sudo` is a stand-in, as the test is root already. Both hosts
share one file system here.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, until
from support.documents import marked
from support.donors.donor_world import SECRET
from support.machine.usershell import BESIDE, Service, bash, join_command, search_path

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
    pytest.mark.requires_tool("ip", "nsenter", "bash"),
]

ADDRESS = "10.0.0.2"
"""The donor's address in the README."""
LOCAL = 48 * MIB
WANTED_MIB = 128


def blocks(kind: str, name: str) -> list[str]:
    """Bodies of the code blocks that are marked so, of the section or of the messages."""
    path = "docs/troubleshooting.md" if kind == "message" else "README.md"
    return [block.body for block in marked(Path(path), kind, name)]


class Machines:
    """Two hosts, a shell on each. The consumer has joined the donor's cluster, and the donor lends,
    as the section's blocks say.

    Attributes:
        net: the namespaces.
        cluster: directories, environment and clean-up of the consumer's device.
        invited: what the donor's first block has said.
        joined: what the consumer's first block has said.
        daemon: the donor's, its second block.
    """

    def __init__(self, net: NetworkNamespaces, cluster: Cluster, join: str = "") -> None:
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
        self.invited, self.joined = self._bring_together(join or blocks("on", "consumer")[0])
        self.daemon = self._service(
            blocks("on", "donor")[1], f"control {self.address}:9400, pages {self.address}:9401"
        )

    def _bring_together(self, join: str) -> tuple[str, str]:
        inviting = self._service(blocks("on", "donor")[0], "Waiting;")
        try:
            command = join_command(inviting.log)
            joined = self.run("consumer", join.replace("infiniswap join TOKEN", command))
            assert joined.returncode == 0, joined.stderr
            until(lambda: "joined: " in inviting.log, "the inviting host to know it")
        finally:
            inviting.end()
        return inviting.log, joined.stdout

    def _service(self, block: str, serving: str) -> Service:
        log = self.cluster.root / f"{block.split()[2]}.log"
        script = self.script("donor", block)
        return Service(script, log, serving, self._environment("donor"), self.cluster.root)

    def _environment(self, host: str) -> dict[str, str]:
        """Both hosts share one file system."""
        return {**self.environment, "INFINISWAP_CONFIG": str(self.config(host))}

    def config(self, host: str) -> Path:
        """Where a host keeps its configuration, with the secret beside it."""
        return self.cluster.root / host / "infiniswap.toml"

    def secret(self, host: str) -> Path:
        """Where a host keeps the secret."""
        return self.config(host).with_name("secret")

    def own(self, text: str, **values: str) -> str:
        """The text with the reader's own values in the assignments that the section makes."""
        for name, value in values.items():
            text = re.sub(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        return text

    def script(self, host: str, commands: str, **values: str) -> list[str]:
        """The command that runs them in a shell of that host."""
        return self.net.command(host, bash(self.own(commands, **values)))

    def run(
        self, host: str, commands: str, peers: str = "", **values: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs commands of the section on a host; `peers`: other donors than it has joined."""
        changes = {"INFINISWAP_CLUSTER_PEERS": peers} if peers else {}
        return subprocess.run(
            self.script(host, commands, **values),
            env={**self._environment(host), **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S * 2,
            check=False,
        )

    def job(self, peers: str = "") -> subprocess.CompletedProcess[str]:
        """The consumer's third block: the program."""
        small = {"LOCAL": str(LOCAL), "MIB": str(WANTED_MIB)}
        return self.run("consumer", blocks("on", "consumer")[2], peers, **small)

    def firewall(self, action: str, port: int) -> None:
        """The donor's: with "add" nothing that its port answers goes out, so nobody gets in;
        until "del"."""
        rule = ["ip", "rule", action, "ipproto", "tcp", "sport", str(port), "blackhole"]
        run_command(self.net.command("donor", rule))

    def counters(self) -> dict[str, int]:
        """The donor's own counters."""
        done = self.run("consumer", "sudo infiniswap status --json\n")
        assert done.returncode == 0, done.stderr
        counters: dict[str, int] = json.loads(done.stdout)["donors"][0]["status"]["counters"]
        return counters

    def message(self, name: str) -> str:
        """What the documents say will be printed."""
        return blocks("message", name)[0].strip().replace(ADDRESS, self.address)

    def expect(self, done: subprocess.CompletedProcess[str], message: str, code: int) -> None:
        """It failed with the documents' message and that exit code, and left nothing behind."""
        assert message in done.stderr.splitlines(), done.stderr
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert self.cluster.leftovers() == self._daemon_itself()

    def _daemon_itself(self) -> list[str]:
        """Its processes, and where its slabs lie (docs/adr/0015)."""
        own = re.compile(rf" (daemon|bash)( |$)|^mount {re.escape(str(self.cluster.root))}/donors/")
        return [text for text in self.cluster.leftovers() if own.search(text)]


@pytest.fixture
def machines(cluster: Cluster) -> Iterator[Machines]:
    with NetworkNamespaces(["donor", "consumer"]) as net:
        made = Machines(net, cluster)
        try:
            yield made
        finally:
            made.daemon.end()


def test_the_section_as_it_stands(machines: Machines) -> None:
    for host in ("donor", "consumer"):
        assert machines.secret(host).stat().st_mode & 0o777 == 0o600
    assert "plain TCP" in machines.daemon.log  # the warning of the start-up
    secret = machines.secret("donor").read_text()
    assert machines.secret("consumer").read_text() == secret
    assert secret.strip() not in machines.invited + machines.joined
    assert (
        f"joined: {socket.gethostname()} ({machines.net.address('consumer')})" in machines.invited
    )

    looked = machines.run("consumer", blocks("on", "consumer")[1])
    assert looked.returncode == 0, looked.stderr
    assert "serving" in looked.stdout

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
    machines.expect(machines.job(peers=nobody), message, 6)


def test_a_daemon_that_does_not_run(machines: Machines) -> None:
    machines.daemon.end()
    machines.expect(machines.job(), machines.message("refused"), 6)


@pytest.mark.parametrize(("port", "name"), [(9400, "control"), (9401, "data")])
def test_a_blocked_port(machines: Machines, port: int, name: str) -> None:
    machines.firewall("add", port)
    machines.expect(machines.job(), machines.message(name), 6)


def test_the_port_of_the_pages_instead_of_the_control_port(machines: Machines) -> None:
    machines.expect(machines.job(peers=f"{machines.address}:9401"), machines.message("port"), 7)


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
    command = f"sudo infiniswap run --local {LOCAL} -- "
    command += f"python3 {script} {started} {go_on}\n"
    job = subprocess.Popen(
        machines.script("consumer", command),
        env=machines._environment("consumer"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = machines.cluster.run_dir / "run" / "log"
    wanted = re.escape(machines.message("slow")).replace(r"1\ slab", r"\d+\ slabs?")
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


@pytest.mark.full
def test_each_host_uses_the_memory_of_the_other(cluster: Cluster) -> None:
    """README: join with --lend, and start the daemon here, too."""
    with NetworkNamespaces(["donor", "consumer"]) as net:
        lend = blocks("on", "consumer")[0].replace("TOKEN", "TOKEN --lend")
        made = Machines(net, cluster, lend)
        made.daemon.end()
        here = net.address("consumer")
        assert f"has added {here}:9400 to cluster.peers" in made.invited
        daemon = Service(
            made.script("consumer", blocks("on", "donor")[1]),
            cluster.root / "here.log",
            f"control {here}:9400",
            {**made._environment("consumer"), "INFINISWAP_DAEMON_RUN_DIR": ""},
            cluster.root,
        )
        try:
            done = made.run(
                "donor", blocks("on", "consumer")[2], LOCAL=str(LOCAL), MIB=str(WANTED_MIB)
            )
        finally:
            daemon.end()
    assert done.returncode == 0, done.stderr
    assert re.search(r"paged out .*, in .* \(donors \d", done.stderr), done.stderr
