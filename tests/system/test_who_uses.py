# SPDX-License-Identifier: Apache-2.0
"""Who uses a donor's memory: a job on one host, asked for on the host that lends."""

from __future__ import annotations

import json
import pwd
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import NEEDS_SWAP, PROGRAM, SLAB, WAIT_S, Cluster, until
from support.jobs.runs import Runner, ready
from support.machine.ran import ran

from infiniswap.system.netns import NetworkNamespaces
from infiniswap.units import MIB

NOBODY = "nobody"
PYTHON = "/usr/bin/python3"
"""One that this user may execute."""

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.requires_netns,
    pytest.mark.requires_tool("ip", "nsenter", PYTHON),
]

JOB = """
import sys
data = bytearray(b"x") * (96 << 20)
print("ready", flush=True)
sys.stdin.read()
print(data.count(b"x"))
"""


def test_a_job_is_named_at_the_donor_also_after_a_restart_of_its_daemon(
    cluster: Cluster, secret_file: Path
) -> None:
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "60"  # a slow machine restarts slowly
    runner = Runner(cluster)
    with NetworkNamespaces(["donor", "consumer"]) as net:
        address = net.address("donor")
        at_donor = tuple(net.command("donor", []))
        donor = cluster.donor("--name", "moon", host=address, port=9400, prefix=at_donor)

        def rows() -> list[Any]:
            argv = [*at_donor, *PROGRAM, "donor", "leases", "--json"]
            env = {**cluster.env, "INFINISWAP_DAEMON_LISTEN": donor.address}
            done = ran(*argv, env=env, wait_s=2 * WAIT_S)
            assert done.returncode == 0, done.stderr
            found: list[Any] = json.loads(done.stdout)["leases"]
            return found

        options = ("--donors", donor.address, "--size", "128M", "--tenant", "physics")
        argv = runner.argv(PYTHON, "-c", JOB, options=options)
        env = {**cluster.env, "SUDO_UID": str(pwd.getpwnam(NOBODY).pw_uid)}
        run = net.command("consumer", argv)
        process = runner.start(run, env=env, stdin=subprocess.PIPE)
        try:
            ready(process)
            until(lambda: any(row["slots_mapped"] for row in rows()), "slabs that the job has")
            (row,) = rows()
            names = {
                "host_name": socket.gethostname(),
                "host_certified": False,
                "device_name": "run",
                "job": "python3",
                "user": NOBODY,
                "uid": pwd.getpwnam(NOBODY).pw_uid,
                "tenant": "physics",
            }
            assert {key: row[key] for key in names} == names
            assert row["held_bytes"] == row["slots_mapped"] * SLAB
            assert row["transport"] == "tcp"
            assert row["since"]
            donor.end(signal.SIGKILL)
            donor = cluster.donor("--name", "moon", host=address, port=9400, prefix=at_donor)
            (again,) = rows()
            kept = (*names, "since", "lease", "device_id")
            assert {key: again[key] for key in kept} == {key: row[key] for key in kept}
            assert "bytearray" not in json.dumps(again)  # nothing of the job's arguments
        finally:
            out, err = process.communicate(b"", timeout=2 * WAIT_S)
        assert process.returncode == 0, err.decode()
        assert out.split()[-1] == str(96 * MIB).encode()
        until(lambda: not rows(), "a lease that was given back")
        assert donor.end() == 0
