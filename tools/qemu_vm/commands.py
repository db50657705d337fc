# SPDX-License-Identifier: Apache-2.0
"""Other programs: found by name, run with a bound."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from infiniswap.errors import DeadlineError, SystemCallError, UnavailableError

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
_SHOWN = 600
"""So many characters of a failed program's last words are shown."""

PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "mkfs.ext4": "e2fsprogs",
    "modprobe": "kmod",
    "depmod": "kmod",
    "setpriv": "util-linux",
    "apt-get": "apt",
    "apt-cache": "apt",
    "apt-config": "apt",
    "dpkg-deb": "dpkg",
    "ip": "iproute2",
    "rdma": "iproute2",
    "cc": "gcc",
}
"""Debian's package of each program."""


def find(program: str) -> str:
    """Path of a program.

    Raises:
        UnavailableError: it is not installed.
    """
    found = shutil.which(program, path=_PATH)
    if found is None:
        raise UnavailableError(
            f"virtual machines need the program {program}, and it is not installed",
            mend=f"On Debian: apt-get install {PACKAGES.get(program, program)}.",
        )
    return found


def run(
    *argv: str,
    bound_s: float,
    what: str,
    mend: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
) -> bytes:
    """Runs a program and returns its output.

    Args:
        argv: program and arguments.
        bound_s: longest time it may take, in seconds.
        what: what fails when it does, for the message: "cannot unpack the kernel".
        mend: what can be done then.
        env: more environment variables.
        cwd: its working directory.
        stdin: its standard input.

    Raises:
        UnavailableError: it is not installed.
        DeadlineError: it took too long.
        SystemCallError: it failed.
    """
    command: Sequence[str] = [find(argv[0]), *argv[1:]]
    try:
        done = subprocess.run(
            command,
            input=b"" if stdin is None else stdin,
            capture_output=True,
            timeout=bound_s,
            check=False,
            cwd=cwd,
            env={**os.environ, "PATH": _PATH, "LC_ALL": "C", **(env or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"{what}: {argv[0]} did not end within {bound_s:g} s", mend=mend
        ) from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()[-_SHOWN:]
        raise SystemCallError(f"{what}: {argv[0]} failed: {words or done.returncode}", mend=mend)
    return done.stdout


def dying_with_us(*argv: str) -> list[str]:
    """A command line whose program is killed when this process is.

    Raises:
        UnavailableError: it is not installed.
    """
    return [find("setpriv"), "--pdeathsig", "KILL", find(argv[0]), *argv[1:]]
