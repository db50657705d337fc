# SPDX-License-Identifier: Apache-2.0
"""Whom a job runs as under `sudo infiniswap run`: the user who called sudo, with that user's
groups, environment and PATH.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.errors import NotPermittedError, UsageError
from infiniswap.system.files import PROC

_ANCESTORS_MAX: Final = 64

_SET_BY_SUDO: Final = frozenset(
    {"HOME", "LOGNAME", "MAIL", "PATH", "SHELL", "USER", "USERNAME", "_"}
)
"""Variables whose value after sudo says nothing about what its caller wanted."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom the job runs as. `environment` is complete."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    environment: Mapping[str, str]


def invoking_user(environ: Mapping[str, str], *, proc: Path = PROC) -> User | None:
    """The user who called sudo; None when it was not sudo, or root called it.

    Args:
        environ: of this process.
        proc: root of the proc file system.

    Raises:
        UsageError: SUDO_UID names no user.
        NotPermittedError: this process cannot become that user.
    """
    text = environ.get("SUDO_UID", "")
    if not text or text == "0":
        return None
    try:
        entry = pwd.getpwuid(int(text))
    except (ValueError, KeyError, OverflowError):
        raise UsageError(
            f"SUDO_UID={text} names no user of this host",
            mend="Unset SUDO_UID to run the command as root.",
        ) from None
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
        if lacking := rights.lacking(capability, proc=proc):
            raise NotPermittedError(
                f"running the command as {entry.pw_name} needs {lacking}",
                mend=f"{rights.way_to(lacking)}, or unset SUDO_UID to run the command as root.",
            )
    environment = job_environment(environ, _environment_before_sudo(proc))
    environment.update(HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name)
    environment.setdefault("SHELL", entry.pw_shell or "/bin/sh")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, environment)


def job_environment(
    environ: Mapping[str, str], before_sudo: Mapping[str, str] | None
) -> dict[str, str]:
    """What the user's shell gave to sudo, and on top of it what was set since.

    sudo itself hands on a reduced environment with another PATH. What is here and was not there
    was set on purpose: `sudo NAME=value infiniswap run`, or a script between the two.

    Args:
        environ: of this process.
        before_sudo: of sudo's own process, None when it is not known.
    """
    own = {key: value for key, value in environ.items() if not key.startswith("SUDO_")}
    if before_sudo is None:
        for key in _SET_BY_SUDO - {"PATH"}:
            own.pop(key, None)
        own.setdefault("PATH", os.defpath)
        return own
    own = {key: value for key, value in own.items() if key not in _SET_BY_SUDO}
    return {**before_sudo, **own}


def _environment_before_sudo(proc: Path) -> dict[str, str] | None:
    """Environment of the nearest sudo above this process; of the outer one of a sudo that has put
    a monitor process in between."""
    found: int | None = None
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        try:
            comm = (proc / str(pid) / "comm").read_text(errors="replace").strip()
            stat = (proc / str(pid) / "stat").read_text(errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        if comm == "sudo":
            found = pid
        elif found is not None:
            break
        pid = parent
    if found is None:
        return None
    try:
        raw = (proc / str(found) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0"))
    return {key: value for key, equals, value in pairs if key and equals}


@contextlib.contextmanager
def acting_as(user: User | None) -> Iterator[None]:
    """File access of this process with that user's rights while it is open; None changes nothing.

    For files that a user names: what only root may write must not become writable by way of
    `sudo infiniswap run`, and what is made has the right owner.
    """
    if user is None:
        yield
        return
    groups, gid, uid = os.getgroups(), os.getegid(), os.geteuid()
    os.setgroups(user.groups)
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(groups)
