# SPDX-License-Identifier: Apache-2.0
"""An `infiniswap run` whose job pages, and all that is seen of it; users who start one.

For tests without systemd, and for programs that a systemd of a test's own runs.
"""

from __future__ import annotations

import contextlib
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from infiniswap.device.control import client
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import InfiniswapError
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.units import MIB

GROUP: Final = "infiniswap"
LOCAL: Final = "16M"
JOB_MIB: Final = 24
SEEN_S_MAX: Final = 600.0
_TICK_S = 0.1


def make_user(name: str, *groups: str) -> int:
    """A user of this host, as an administrator makes one; returns the number."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(name).pw_uid
    subprocess.run(["useradd", "--no-create-home", name], check=True)
    for group in groups:
        subprocess.run(["groupadd", "--system", "--force", group], check=True)
        subprocess.run(["usermod", "-aG", group, name], check=True)
    return pwd.getpwnam(name).pw_uid


def as_user(name: str) -> list[str]:
    """Begins the command line with which root becomes a user, groups and all."""
    user = pwd.getpwnam(name)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]


def run_argv(pagecheck: Path, *options: str) -> list[str]:
    """`infiniswap run` of a job that goes on until it is told to end."""
    run = [sys.executable, "-m", "infiniswap", "run", "--local", LOCAL, *options]
    return [*run, "--", str(pagecheck), str(JOB_MIB), "7", "0"]


def watch(process: subprocess.Popen[bytes], paths: DevicePaths) -> dict[str, Any]:
    """Lets the job of a run page to donors, ends it, and tells what was there and what is left.

    Args:
        process: the run, with pipes for what it says.
        paths: of the device that it uses.
    """
    seen: dict[str, Any] = {}
    look = _Look(process.pid, paths)
    end_s = time.monotonic() + SEEN_S_MAX
    while not seen and process.poll() is None and time.monotonic() < end_s:
        time.sleep(_TICK_S)
        with contextlib.suppress(InfiniswapError, OSError):
            seen = look.seen()
    process.send_signal(signal.SIGTERM if seen else signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=SEEN_S_MAX)
    seen |= {"exit_code": process.returncode, "said": stdout.decode() + stderr.decode()}
    return seen | {"left": [cgroup.name for cgroup in find_job_cgroups()]}


class _Look:
    """Looks for a run whose job has got a page back from a donor.

    Args:
        pid: of the run.
        paths: of the device that it uses.
    """

    def __init__(self, pid: int, paths: DevicePaths) -> None:
        self._pid = pid
        self._paths = paths
        self._before: int | None = None

    def _is_paged(self, cgroup: Path, pages_in: int) -> bool:
        """Until the job has pages out, it is the swap area's header that has come back, or what
        others have there."""
        if self._before is None and int((cgroup / "memory.swap.current").read_text()):
            self._before = pages_in
        return self._before is not None and pages_in > self._before

    def seen(self) -> dict[str, Any]:
        """What there is; nothing as long as no page has come back."""
        cgroups = [found for found in find_job_cgroups() if f"-{self._pid}-" in found.name]
        status = client.status(self._paths)
        pids = [pid for cgroup in cgroups for pid in cgroup.pids()]
        if not pids or not self._is_paged(cgroups[0].path, status.stats["pages_in_remote"]):
            return {}
        if not _catches_sigterm(pids[0]):
            return {}
        (cgroup,), (job,) = cgroups, pids
        return {
            "cgroup": str(cgroup.path),
            "below": Path(f"/proc/{job}/cgroup").read_text().strip().rpartition("/")[2],
            "uid": Path(f"/proc/{job}").stat().st_uid,
            "limits": {
                name: (cgroup.path / name).read_text().strip()
                for name in ("memory.max", "memory.high", "memory.swap.max")
            },
            "frontend": status.frontend,
            "runs": status.runs == [self._pid],
        }


def _catches_sigterm(pid: int) -> bool:
    """Whether it is pagecheck itself, past its first lines: what runs in the cgroup before it may
    be paged, too, and would be ended by the signal without a word."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    caught = int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1
    return status["Name"] == "pagecheck" and bool(caught)


def check(seen: dict[str, Any], *, uid: int) -> None:
    """What holds wherever the job's cgroup is and whoever has made it."""
    assert seen["exit_code"] == 0, seen
    assert f"ok {JOB_MIB * 256}" in seen["said"], seen
    assert "Traceback" not in seen["said"], seen
    assert seen["uid"] == uid
    limit = str(int(LOCAL.removesuffix("M")) * MIB)
    assert seen["limits"] == {"memory.max": limit, "memory.high": "max", "memory.swap.max": "max"}
    assert seen["runs"]
    assert seen["left"] == []
