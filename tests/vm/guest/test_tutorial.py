# SPDX-License-Identifier: Apache-2.0
"""The tutorial, word for word, on two machines that share nothing but a network.

As in tests/system/test_doc_commands.py sizes are smaller, and `sudo` and `ssh` are stand-ins: the
test is root, and machines of the test have no sshd. Everything else stays where the document puts
it: it is a machine of its own, and nothing of it is kept.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import disk_directory, environment, run
from support.documents import blocks
from support.machine.usershell import Service, bash, search_path, smaller

from infiniswap.units import MIB

pytestmark = [
    pytest.mark.full,
    pytest.mark.machine(hosts=2),
    pytest.mark.timeout(3600),
    pytest.mark.requires_tool("mosquitto"),
]

GIB_MIB = 32
"""So many MiB are a GiB here."""
SHARE = Path("/run/vm/share")
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

    def serve(self, kind: str, text: str) -> None:
        """Commands of which the last one runs on; the one of this kind before ends."""
        if kind in self._services:
            self._services[kind].end()
        argv = self._argv(text.rstrip() + (" -v" if kind == "broker" else ""))
        log = self._work / f"{kind}.log"
        self._services[kind] = Service(argv, log, _SERVES[kind], self._env, self._work)

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
    finally:
        shell.close()
    if role == "consumer":
        assert said.count(f"\n{3 * GIB_MIB * MIB}\n") == 2, said
        assert len(re.findall(r"paged out .*, in .* \(donors [1-9]", said)) == 2, said
        # Named, then announced.
        assert len(re.findall(r"10\.0\.0\.2:9400 .* serving", said)) == 2, said
        assert not Path("/proc/swaps").read_text().count("\n") > 1
