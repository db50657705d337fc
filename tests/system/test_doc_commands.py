# SPDX-License-Identifier: Apache-2.0
"""Commands of the documents, run as they stand, on hosts in network namespaces.

Which blocks, and where, is said by the comment above each (see documents.py):

- donor: the host 10.0.0.2. Its last command may be `infiniswap daemon`, which then runs on until
  the next block for a donor; where a document has none, a daemon runs that knows the secret.
- broker: the same host; its last command is the broker, which runs on until the end.
- consumer: a host that can reach it; its configuration is empty but for the cluster's secret.
- here: a shell in the checkout, on no network.
- cluster: the same, and its `tools/netns-cluster` is a cluster of the test's own.

Full runs add the blocks that need libraries, which not every machine has (support/guides.py).

Each document starts with an empty directory and a donor without leases. Changed are sizes (a GiB is
GIB_MIB MiB here), and the directory /etc/infiniswap, of which each host has its own. `sudo` and
`ssh` are stand-ins: the test is root, and both hosts share one file system.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, environment
from support.documents import ROOT, Block, blocks, documents
from support.donors.donor_world import SECRET
from support.guides import GIB_MIB, PAGED, prepare, skip_without
from support.machine.netns_hosts import left_of, unused_name
from support.machine.usershell import BESIDE, Service, bash, search_path, smaller

from infiniswap.system.netns import NetworkNamespaces
from infiniswap.units import MIB

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.requires_netns,
    pytest.mark.requires_tool("ip", "nsenter", "tc", "bash", "nbdcopy", "mosquitto"),
]

RUNNABLE = {
    path: found
    for path in documents()
    if (found := [block for block in blocks(path) if block.kind == "run"])
}
GUIDES = {
    path: found
    for path in documents()
    if any(block.kind == "full" for block in blocks(path))
    and (found := [block for block in blocks(path) if block.kind in ("run", "full")])
}

_DAEMON = re.compile(r"^sudo infiniswap daemon(?! --release).*\n\Z", re.MULTILINE)
_LENDS = "sudo infiniswap daemon --listen 10.0.0.2:9400 --secret-file /etc/infiniswap/secret\n"


class Hosts:
    """A donor and a consumer, with the addresses that the documents use.

    Attributes:
        net: the namespaces.
        cluster: directories, environment and clean-up of devices.
        work: directory in which commands run.
        programs: directory of the stand-ins, before every other on the path.
        said: what they have printed.
    """

    def __init__(self, net: NetworkNamespaces, cluster: Cluster) -> None:
        self.net = net
        self.cluster = cluster
        self.work = cluster.root / "work"
        self.work.mkdir()
        self.programs = cluster.root / "bin"
        self._path = search_path(self.programs, BESIDE)
        self._daemon: Service | None = None
        self._broker: Service | None = None
        self._cluster_name = ""
        self.said = ""
        for host in ("donor", "consumer"):
            etc = self.etc(host)
            etc.mkdir(parents=True)
            (etc / "secret").write_text(SECRET)
            (etc / "secret").chmod(0o600)
            (etc / "infiniswap.toml").write_text(f'[cluster]\nsecret_file = "{etc}/secret"\n')

    def etc(self, host: str) -> Path:
        """What is /etc/infiniswap to a host."""
        return self.cluster.root / host / "infiniswap"

    def environment(self, host: str) -> dict[str, str]:
        """As of a user who has installed Infiniswap, with small sizes."""
        env = self.cluster.env
        return {
            **env,
            "PATH": self._path,
            "INFINISWAP_CONFIG": str(self.etc(host) / "infiniswap.toml"),
            "INFINISWAP_DAEMON_SLAB": env["INFINISWAP_DEVICE_SLAB"],
            "INFINISWAP_DAEMON_POOL": "256M",
            "INFINISWAP_DAEMON_HEADROOM": "16M",
            "INFINISWAP_CLUSTER_ASK_S": "30",
        }

    def run(self, block: Block) -> None:
        """Runs a block; what it starts that goes on is ended by close()."""
        if block.host == "donor":
            self._lend(self._own(block.body, "donor"))
        elif block.host == "broker":
            self._broker = self._serve("broker", f"{block.body.rstrip()} -v", " running")
        elif block.host == "consumer":
            if self._daemon is None:
                self._lend(self._own(_LENDS, "donor"))
            if "infiniswap init" in block.body:
                file = self.etc("consumer") / "infiniswap.toml"
                file.unlink()
                if block.path.name == "tutorial.md":  # as on a host with the Debian package
                    shutil.copy(ROOT / "tools/deb_package/files/infiniswap.toml", file)
            text = self._own(block.body, "consumer")
            self._finish(block, self.net.command("consumer", bash(text)))
        elif block.host == "here":
            self._finish(block, bash(block.body), of_checkout=True)
        else:
            self._finish(block, bash(self._in_cluster(block.body)), of_checkout=True)

    def _own(self, text: str, host: str) -> str:
        return smaller(text.replace("/etc/infiniswap", str(self.etc(host))), GIB_MIB)

    def _in_cluster(self, text: str) -> str:
        name = self._cluster_name = self._cluster_name or unused_name()
        text = text.replace("tools/netns-cluster up", "tools/netns-cluster up --detach")
        text = re.sub(r"(tools/netns-cluster )(\w+)", rf"\1\2 --name {name}", text)
        return text.replace("/run/infiniswap-cluster/local/", f"/run/infiniswap-cluster/{name}/")

    def _finish(self, block: Block, command: list[str], *, of_checkout: bool = False) -> None:
        done = subprocess.run(
            command,
            env=environment({"PATH": self._path}) if of_checkout else self.environment("consumer"),
            cwd=ROOT if of_checkout else self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S * 4,
            check=False,
        )
        said = f"{block.where}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        assert "Traceback" not in done.stderr, said
        self.said += said

    def _lend(self, text: str) -> None:
        """Runs commands on the donor, of which the last is the daemon."""
        assert _DAEMON.search(text), "its last command has to be the daemon"
        self.end_daemon()
        secret = self.etc("donor") / "secret"
        if "init --secret" in text:
            secret.unlink()
        self._daemon = self._serve("daemon", text, "pages 10.0.0.2:9401")
        # What the consumer's `ssh` finds is its own file.
        shutil.copy(secret, self.etc("consumer") / "secret")

    def _serve(self, name: str, text: str, serving: str) -> Service:
        argv = self.net.command("donor", bash(text))
        log = self.cluster.root / f"{name}.log"
        return Service(argv, log, serving, self.environment("donor"), self.work)

    def end_daemon(self) -> None:
        """As Ctrl-C in its shell does, and what it keeps for a successor is given back."""
        if self._daemon is not None:
            self._daemon.end()
            self._daemon = None
            self.cluster.ok("daemon", "--release")

    def close(self) -> None:
        """Ends daemon, broker and cluster."""
        try:
            self.end_daemon()
        finally:
            if self._broker is not None:
                self._broker.end()
            if self._cluster_name:
                down = [str(ROOT / "tools/netns-cluster"), "down", "--name", self._cluster_name]
                subprocess.run(down, check=True, capture_output=True, timeout=WAIT_S)
                assert not left_of(self._cluster_name)


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[Hosts]:
    with NetworkNamespaces(["donor", "consumer"], network="10.0.0.0/24") as net:
        made = Hosts(net, cluster)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize(
    "path",
    [  # manual pages repeat what the other documents show
        pytest.param(path, marks=[pytest.mark.full] if path.parent.name == "man" else [])
        for path in RUNNABLE
    ],
    ids=str,
)
def test_the_commands_of_a_document(path: Path, hosts: Hosts) -> None:
    for block in RUNNABLE[path]:
        hosts.run(block)
    assert not hosts.cluster.names(), "it leaves a device behind"
    if path.name == "tutorial.md":
        assert hosts.said.count(f"\n{3 * GIB_MIB * MIB}\n") == 2
        paged = re.findall(r"paged out .*, in .* \(donors [1-9]", hosts.said)
        assert len(paged) == 2, hosts.said
        # Named, then announced.
        assert len(re.findall(r"10\.0\.0\.2:9400 .* serving", hosts.said)) == 2, hosts.said


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", GUIDES, ids=str)
def test_the_commands_of_a_guide(path: Path, hosts: Hosts) -> None:
    needs = sorted({need for block in GUIDES[path] for need in block.needs})
    skip_without(needs)
    with prepare(needs, hosts.programs):
        for block in GUIDES[path]:
            hosts.run(block)
    assert not hosts.cluster.names(), "it leaves a device behind"
    jobs = sum(block.body.count("infiniswap run ") for block in GUIDES[path] if block.needs)
    assert len(PAGED.findall(hosts.said)) >= jobs, hosts.said
