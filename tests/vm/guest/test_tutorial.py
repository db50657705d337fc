# SPDX-License-Identifier: Apache-2.0
"""The tutorial, word for word, on two machines that share nothing but a network.

As in tests/system/test_doc_commands.py sizes are smaller, and `sudo` and `ssh` are stand-ins: the
test is root, and machines of the test have no sshd. Everything else stays where the document puts
it: it is a machine of its own, and nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import WAIT_S, disk_directory, run, until
from documents import blocks

from infiniswap.units import MIB

pytestmark = [
    pytest.mark.full,
    pytest.mark.machine(hosts=2),
    pytest.mark.timeout(1800),
    pytest.mark.requires_tool("mosquitto"),
]

GIB_MIB = 32
"""So many MiB are a GiB here."""
SHARE = Path("/run/vm/share")
ADDRESSES = {"donor": "10.0.0.2", "consumer": "10.0.0.3"}
_STAND_INS = {"sudo": 'exec "$@"', "ssh": f"exec cat {SHARE}/tutorial-secret"}
_SERVES = {"donor": "pages 10.0.0.2:9401", "broker": " running"}


def smaller(text: str) -> str:
    """The sizes of a block's commands."""
    text = re.sub(r"(\d+) << 30", lambda match: f"{int(match[1]) * GIB_MIB} << 20", text)
    return re.sub(r"(?<![\w.])(\d+)G\b", lambda match: f"{int(match[1]) * GIB_MIB}M", text)


class Shell:
    """Of a user on one of the machines.

    Args:
        directory: for the stand-ins and what is said.
    """

    def __init__(self, directory: Path) -> None:
        self._work = directory / "work"
        self._work.mkdir()
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        stand_ins = directory / "bin"
        stand_ins.mkdir()
        for name, body in _STAND_INS.items():
            (stand_ins / name).write_text(f"#!/bin/sh\n{body}\n")
            (stand_ins / name).chmod(0o755)
        own = {name: value for name, value in os.environ.items() if "INFINISWAP" not in name}
        self._env = own | {
            "PATH": f"{stand_ins}:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
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
        self.end(kind)
        log = self._work / f"{kind}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._argv(text.rstrip() + (" -v" if kind == "broker" else "")),
                env=self._env,
                cwd=self._work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self._services[kind] = process

        def serves() -> bool:
            assert process.poll() is None, log.read_text()
            return _SERVES[kind] in log.read_text()

        until(serves, f"the {kind} to serve")

    def end(self, kind: str) -> None:
        """As Ctrl-C does."""
        process = self._services.pop(kind, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            process.wait(WAIT_S)
            assert "Traceback" not in (self._work / f"{kind}.log").read_text()

    def close(self) -> None:
        """Ends what is still running."""
        for kind in list(self._services):
            self.end(kind)

    @staticmethod
    def _argv(text: str) -> list[str]:
        return ["bash", "-c", f"set -euo pipefail\n{smaller(text)}"]


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
