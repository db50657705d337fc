# SPDX-License-Identifier: Apache-2.0
"""docs/howto/slurm.md: a job of Slurm's that pages, with Debian's packages on one machine.

apt-get install slurmctld slurmd slurm-client munge; their services need not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, free_port, until
from support.documents import blocks, marked
from support.guides import shell
from support.machine.ran import ran
from support.machine.usershell import search_path

GUIDE = Path("docs/howto/slurm.md")
CONFIG = """
ClusterName=of-a-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=2000 State=UNKNOWN
"""
CGROUP_CONFIG = """
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
"""

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.full,
    pytest.mark.requires_tool("slurmctld", "slurmd", "sbatch", "munged", "bash", "logger"),
]


class Slurm:
    """One node, its controller and munge, with the settings of the guide.

    Attributes:
        cluster: donors and directories.
        env: for Slurm's commands.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.root = cluster.root / "slurm"
        self.root.mkdir()
        # munge refuses directories that others can write to.
        for name in ("munge", "state", "spool"):
            (self.root / name).mkdir(mode=0o755)
        self._infiniswap()
        self._config()
        programs = search_path(cluster.root / "bin", "")
        self.env = {**cluster.env, "PATH": programs, "SLURM_CONF": str(self.root / "slurm.conf")}
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def here(self) -> dict[str, str]:
        """What the guide's paths are here."""
        return {"/etc/slurm": str(self.root), "/usr/bin/infiniswap": str(self.root / "infiniswap")}

    def _infiniswap(self) -> None:
        """Slurm gives its scripts a new environment: settings of this test go with the program."""
        donors = {"INFINISWAP_CLUSTER_PEERS": self.cluster.donor().address}
        settings = {name: text for name, text in self.cluster.env.items() if "INFINISWAP" in name}
        words = " ".join(f"'{name}={text}'" for name, text in {**settings, **donors}.items())
        program = self.root / "infiniswap"
        program.write_text(f'#!/bin/sh\nexec env {words} {" ".join(self.cluster.program)} "$@"\n')
        program.chmod(0o755)

    def _config(self) -> None:
        main, cgroup = (block.body for block in blocks(GUIDE) if block.language == "ini")
        for old, new in {"/etc/slurm": str(self.root), "=1024": "=64"}.items():
            assert old in main
            main = main.replace(old, new)
        ports = {"control_port": free_port(), "node_port": free_port()}
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(host=host, root=self.root, **ports)
        (self.root / "slurm.conf").write_text(text + main)
        (self.root / "cgroup.conf").write_text(CGROUP_CONFIG + cgroup)

    def start(self) -> None:
        """Until the node takes jobs."""
        key = self.root / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        places = {name: self.root / "munge" / name for name in ("socket", "pid", "seed", "log")}
        names = {"pid": "pid-file", "seed": "seed-file", "log": "log-file"}
        options = [f"--{names.get(name, name)}={path}" for name, path in places.items()]
        self._serve("munged", "--foreground", "--force", f"--key-file={key}", *options)
        until(places["socket"].exists, "munge")
        self._serve("slurmctld", "-D", "-c")
        self._serve("slurmd", "-D")
        until(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"), "a node")

    def _serve(self, *argv: str) -> None:
        with (self.root / f"{argv[0]}.log").open("wb") as log:
            process = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log)
        self._running.append(process)

    def ask(self, *argv: str) -> str:
        """A command of Slurm's; whatever it says."""
        return ran(*argv, env=self.env).stdout

    @property
    def log(self) -> str:
        """Of all three."""
        return "".join(path.read_text() for path in sorted(self.root.glob("*.log")))

    def close(self) -> None:
        """Ends what was started, the node first."""
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for directory in sorted(Path("/sys/fs/cgroup").glob("*/slurm*")):
            for path, _, _ in sorted(os.walk(directory), reverse=True):
                with contextlib.suppress(OSError):
                    os.rmdir(path)


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    made = Slurm(cluster)
    try:
        yield made
    finally:
        made.close()


def test_a_job_pages_to_donors_until_the_epilog(slurm: Slurm, cluster: Cluster) -> None:
    (node,) = marked(GUIDE, "on", "node")
    (user,) = marked(GUIDE, "on", "user")
    work = slurm.root / "work"
    work.mkdir()
    done = ran(*shell(node, slurm.here), env=slurm.env, cwd=work)
    assert done.returncode == 0, done.stderr
    # What the device has done, before the epilog removes it.
    epilog = slurm.root / "infiniswap-epilog"
    lines = epilog.read_text().splitlines()
    seen = slurm.root / "seen"
    show = f'{slurm.root}/infiniswap device show "job$SLURM_JOB_ID" >{seen} 2>&1'
    epilog.write_text("\n".join([lines[0], show, *lines[1:], ""]))
    slurm.start()
    done = ran(*shell(user, {}), env=slurm.env, cwd=work, wait_s=2 * WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.log
    until(lambda: "idle" in slurm.ask("sinfo", "--noheader", "--format=%t"), "the epilog")
    (output,) = work.glob("slurm-*.out")
    assert output.read_text() == f"{6 * 48 << 20}\n", slurm.log
    shown = seen.read_text()
    assert re.search(r"^page-out: +(?!0 B)", shown, re.MULTILINE), shown
    assert re.search(r"^from donors: +(?!0\.0%|no )", shown, re.MULTILINE), shown
    assert not cluster.names(), "the epilog leaves a device"
