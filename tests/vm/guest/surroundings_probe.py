# SPDX-License-Identifier: Apache-2.0
"""A process that is settled from a session of systemd's, and one from a service's own cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from infiniswap.system.programs import run_command
from infiniswap.system.surroundings import leave
from infiniswap.system.surroundings.groups import is_in_unit


def settled(name: str) -> str:
    """The cgroup of a child, once it is settled."""
    child = subprocess.Popen(["/usr/bin/python3", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        leave.settle(child.pid, name)
        return Path(f"/proc/{child.pid}/cgroup").read_text().strip()
    finally:
        child.communicate(b"\n")


def main() -> None:
    if sys.argv[1:] == ["session"]:
        limit = Path("/sys/fs/cgroup/user.slice/user-0.slice/session-9.scope/memory.max")
        own, left = Path("/proc/self/cgroup").read_text().strip(), settled("isw-probe")
        print(json.dumps({"own": own, "limit": limit.read_text().strip(), "left": left}))
        return
    service = {"in_unit": is_in_unit(os.getpid()), "service": settled("isw-other")}
    scope = ["systemd-run", "--scope", "--quiet", "--slice=user-0.slice", "--unit=session-9.scope"]
    command = [*scope, "-p", "MemoryMax=128M", sys.executable, __file__, "session"]
    seen = json.loads(run_command(command, timeout_s=600))
    print("SEEN " + json.dumps(service | seen), flush=True)


if __name__ == "__main__":
    main()
