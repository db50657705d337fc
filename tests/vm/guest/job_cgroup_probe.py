# SPDX-License-Identifier: Apache-2.0
"""A job in the cgroup that `infiniswap run` would make, and everything seen of it, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from infiniswap.device.process import runs
from infiniswap.system import job_cgroup, systemd
from infiniswap.units import MIB

LIMIT_BYTES = 32 * MIB
MEMBER = 65534
JOB = "input(); memory = bytearray(100 << 20); print(len(memory))"


def main() -> None:
    name = runs.cgroup_name(os.getpid())
    cgroup = job_cgroup.create_job_cgroup(name, LIMIT_BYTES)
    job = subprocess.Popen(["/usr/bin/python3", "-c", JOB], stdin=subprocess.PIPE)
    cgroup.add(job.pid)
    seen = {
        "systemd": systemd.is_running(),
        "file": cgroup.path.name,
        "named": cgroup.name == name,
        "inside": cgroup.pids() == (job.pid,),
        "limit": int((cgroup.path / "memory.max").read_text()),
        "zswap": int((cgroup.path / "memory.zswap.max").read_text()),
        "found": [found.name for found in job_cgroup.find_job_cgroups()] == [name],
        "top": str(cgroup.path.parent),
    }
    job.communicate(b"\n")
    # More than its limit, and no swap space: the figures have to be there after its end.
    seen |= {"killed": job.returncode == -9, "oom_kills": cgroup.memory().oom_kills}
    runs.end_job(cgroup)
    seen["gone"] = not cgroup.path.exists() and not job_cgroup.find_job_cgroups()
    member = job_cgroup.create_job_cgroup(name, LIMIT_BYTES, member_pid=os.getpid())
    seen["member_top"] = str(member.path.parent)
    sleepers = [subprocess.Popen(["sleep", "10000"], user=uid) for uid in (MEMBER, 0)]
    for sleeper in sleepers:
        member.add(sleeper.pid)
    seen["others_left"] = runs.end_job(member, MEMBER) == (sleepers[1].pid,)
    seen["own_killed"] = sleepers[0].wait() == -9 and sleepers[1].poll() is None
    runs.end_job(member)
    sleepers[1].wait()
    seen["member_gone"] = not member.path.exists()
    print("SEEN " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    assert Path("/sys/fs/cgroup/cgroup.controllers").exists()
    main()
