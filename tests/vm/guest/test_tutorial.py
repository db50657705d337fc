# SPDX-License-Identifier: Apache-2.0
"""The tutorial, word for word, on two machines that share nothing but a network.

As in tests/system/test_doc_commands.py sizes are smaller, and `sudo` and `ssh` are stand-ins: the
test is root, and machines of the test have no sshd. Everything else stays where the document puts
it: it is a machine of its own, and nothing of it is kept.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import disk_directory, environment, run, until
from support.documents import blocks
from support.machine.usershell import Service, bash, search_path, smaller

from infiniswap.units import MIB

pytestmark = [
    pytest.mark.full,
    pytest.mark.machine(hosts=2),
    pytest.mark.timeout(3600),
    pytest.mark.requires_tool("mosquitto", "curl", "promtool"),
]

GIB_MIB = 32
"""So many MiB are a GiB here."""
SHARE = Path("/run/vm/share")
CONFIG = Path("/etc/infiniswap/infiniswap.toml")
TOKEN = "a-token-of-thirty-two-characters"
JOB = "infiniswap run --local 1G -- "
JOB += """python3 -c 'data = bytearray(b"x") * (3 << 30)
print({data.count(b"x") for _ in range(5)}.pop())'"""
ADDRESSES = {"donor": "10.0.0.2", "consumer": "10.0.0.3"}
_SERVES = {"donor": "pages 10.0.0.2:9401", "broker": " running"}


class Shell:
    """Of a user on one of the machines.

    Args:
        directory: for the stand-ins and what is said.
    """

    def __init__(self, directory: Path) -> None:
        self._work = directory / "work"
        self._work.mkdir()
        self._services: dict[str, Service] = {}
        self._env = environment() | {
            "PATH": search_path(directory / "bin", f"exec cat {SHARE}/tutorial-secret"),
            "INFINISWAP_DAEMON_SLAB": "8M",
            "INFINISWAP_DAEMON_POOL": "128M",
            "INFINISWAP_DAEMON_HEADROOM": "16M",
            "INFINISWAP_DEVICE_SLAB": "8M",
            "INFINISWAP_DEVICE_STAGING": "8M",
            "INFINISWAP_DEVICE_BACKUP_DIR": str(disk_directory()),
            "INFINISWAP_DEVICE_CONNECT_MS": "30000",
            "INFINISWAP_DEVICE_REQUEST_MS": "30000",
            "INFINISWAP_POLICY_HOT_PAGES_PER_S": "1",
            "INFINISWAP_CLUSTER_ASK_S": "30",
        }

    def run(self, text: str) -> str:
        """What the commands have said; they must succeed."""
        done = subprocess.run(
            self._argv(text),
            env=self._env,
            cwd=self._work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{text}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        assert "Traceback" not in said, said
        return said

    def output(self, text: str) -> str:
        """Their standard output alone."""
        return subprocess.run(
            self._argv(text), env=self._env, cwd=self._work, stdout=subprocess.PIPE, check=True
        ).stdout.decode()

    def serve(self, kind: str, text: str) -> None:
        """Commands of which the last one runs on; the one of this kind before ends."""
        if kind in self._services:
            self._services[kind].end()
        argv = self._argv(text.rstrip() + (" -v" if kind == "broker" else ""))
        log = self._work / f"{kind}.log"
        self._services[kind] = Service(argv, log, _SERVES[kind], self._env, self._work)

    def __getitem__(self, kind: str) -> Service:
        """The one of that kind."""
        return self._services[kind]

    def close(self) -> None:
        """Ends what is still running."""
        for service in self._services.values():
            service.end()

    @staticmethod
    def _argv(text: str) -> list[str]:
        return bash(smaller(text, GIB_MIB))


@pytest.fixture
def role(vm_host: str) -> Iterator[str]:
    """ "donor" or "consumer", with the address that the tutorial gives it."""
    mine = "donor" if vm_host == "h1" else "consumer"
    (route,) = [
        line for line in run("ip", "-o", "-4", "address").splitlines() if "10.88.0." in line
    ]
    interface = route.split()[1]
    run("ip", "address", "add", f"{ADDRESSES[mine]}/24", "dev", interface)
    yield mine
    run("ip", "address", "delete", f"{ADDRESSES[mine]}/24", "dev", interface)


def watched_and_unplugged(shell: Shell, role: str, barrier: Callable[[str], None]) -> str:
    """What an administrator does there, and the step "Pull the plug", during one more job.

    The donor's figures are read over the network; its configuration is broken and mended; the
    broker is killed and comes back without what it had retained; then the daemon ends.
    """
    said = ""
    if role == "donor":
        token = Path("/etc/infiniswap/metrics-token")
        token.write_text(TOKEN)
        token.chmod(0o600)
        text = CONFIG.read_text()
        text = text.replace("[cluster]\n", f'[cluster]\nmetrics_token_file = "{token}"\n')
        CONFIG.write_text(text)
        shell.serve("donor", "exec infiniswap daemon")
    barrier("watched")
    if role == "consumer":
        said += shell.run(
            f"curl -fsS -H 'Authorization: Bearer {TOKEN}' http://10.0.0.2:9400/metrics >page\n"
            "promtool check metrics <page\n"
            "grep infiniswap_donor_pool_slabs page\n"
        )
        said += shell.run(JOB)
    else:

        def is_lending() -> bool:
            (row,) = json.loads(shell.output("infiniswap status --json"))["donors"]
            return bool(row["status"]["pool"]["slabs_mapped"])

        until(is_lending, "the job's first slab", 900)
        CONFIG.write_text(f"{text}[devise]\n")
        shell["donor"].send(signal.SIGHUP)
        until(lambda: "was not reloaded" in shell["donor"].log, "word of the broken file", 300)
        CONFIG.write_text(text)
        shell["donor"].send(signal.SIGHUP)
        until(lambda: "reloaded: nothing has changed" in shell["donor"].log, "the mended file", 300)
        announced = shell["donor"].log.count("announced as")
        shell["broker"].end(signal.SIGKILL)
        shell.serve("broker", "exec /usr/sbin/mosquitto -c broker.conf")
        until(
            lambda: shell["donor"].log.count("announced as") > announced,
            "the donor to announce itself",
            300,
        )
        assert is_lending()
        shell["donor"].end()
    barrier("unplugged")
    if role == "donor":
        shell.serve("donor", "exec infiniswap daemon")
    barrier("plugged in")
    if role == "consumer":
        said += shell.run("infiniswap status")
    barrier("found again")
    return said


def test_the_tutorial_word_for_word(
    role: str, tmp_path: Path, barrier: Callable[[str], None]
) -> None:
    shell, said = Shell(tmp_path), ""
    try:
        for block in blocks(Path("docs/tutorial.md")):
            if block.kind != "run":
                continue
            if block.mark == "consumer" and role == "consumer":
                said += shell.run(block.body)
            elif block.mark != "consumer" and role == "donor":
                shell.serve(block.mark, block.body)
                secret = Path("/etc/infiniswap/secret").read_bytes()
                (SHARE / "tutorial-secret").write_bytes(secret)
            barrier(f"tutorial-{block.line}")
        beyond = watched_and_unplugged(shell, role, barrier)
    finally:
        shell.close()
    if role == "consumer":
        assert said.count(f"\n{3 * GIB_MIB * MIB}\n") == 2, said
        assert len(re.findall(r"paged out .*, in .* \(donors [1-9]", said)) == 2, said
        # Named, then announced.
        assert len(re.findall(r"10\.0\.0\.2:9400 .* serving", said)) == 2, said
        assert f"\n{3 * GIB_MIB * MIB}\n" in beyond, beyond
        assert re.search(r"10\.0\.0\.2:9400 .* serving", beyond), beyond
        assert not Path("/proc/swaps").read_text().count("\n") > 1
