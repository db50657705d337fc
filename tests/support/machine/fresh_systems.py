# SPDX-License-Identifier: Apache-2.0
"""A fresh system of Debian in a directory, in which commands run as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from infiniswap.system import swap
from support.devices.cluster import disk_directory
from support.machine.ran import ran

_MINUTES_S = 1800.0
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# Every path lies on a mounted file system elsewhere, too: hence the first mount.
_ENTER = """set -e
mount --bind "$0" "$0"
for directory in dev proc sys; do mount --rbind /$directory "$0/$directory"; done
mount -t tmpfs -o mode=755 none "$0/run"
echo entered
exec sleep infinity
"""


class FreshSystem:
    """One. Its mounts are in a name space that lasts until `close`, so that a device that a command
    starts is there for the next one.

    Args:
        root: where it lies.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)
        self._areas = {area.path for area in swap.active_areas()}
        self._space = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, str(root)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._space.stdout is not None
        assert self._space.stdout.readline() == "entered\n"

    def command(self, *argv: str) -> list[str]:
        """The command line of a command in it."""
        enter = ["nsenter", f"--mount=/proc/{self._space.pid}/ns/mnt", "chroot", str(self.root)]
        environment = ["env", "-i", "HOME=/root", f"PATH={_PATH}", "DEBIAN_FRONTEND=noninteractive"]
        return [*enter, *environment, *argv]

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """A command in it, whatever comes of it."""
        return ran(*self.command(*argv), wait_s=_MINUTES_S)

    def ok(self, *argv: str) -> str:
        """A command that must succeed; returns all that it says."""
        done = self.run(*argv)
        assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """A command that goes on, in the caller's hands; `close` ends it at the latest."""
        return subprocess.Popen(
            self.command(*argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def pids(self) -> list[int]:
        """Of every process in it."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "root") == str(self.root):
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        """Ends all of it, swap areas first."""
        for area in swap.active_areas():
            if area.path not in self._areas:
                ran("swapoff", area.path)
        # A holder starts another process for each that dies, until it is dead itself.
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._space.kill()
        self._space.communicate()


@contextlib.contextmanager
def fresh_system(codename: str) -> Iterator[FreshSystem]:
    """A minimal one of a release, with apt and a network if this host has one."""
    root = disk_directory()
    try:
        make = ("debootstrap", "--variant=minbase")
        done = ran(*make, codename, root, wait_s=_MINUTES_S)
        assert done.returncode == 0, done.stdout[-2000:]
        system = FreshSystem(root)
        try:
            yield system
        finally:
            system.close()
    finally:
        shutil.rmtree(root)
