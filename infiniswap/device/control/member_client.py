# SPDX-License-Identifier: Apache-2.0
"""A member's side of a device: an `infiniswap run` without root. Blocking."""

from __future__ import annotations

import grp
import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from infiniswap.control.text import cleaned
from infiniswap.device.api import ANSWER_BYTES_MAX, DeviceStatus
from infiniswap.device.control.frozen import check_runs
from infiniswap.device.member_api import (
    Ask,
    AskBegin,
    AskEnd,
    AskEnter,
    AskKill,
    AskRaise,
    AskStatus,
    Reply,
)
from infiniswap.device.spec.rundir import DevicePaths, running_names
from infiniswap.errors import ConflictError, InfiniswapError, NotFoundError, NotPermittedError
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.system.acl import group_of
from infiniswap.system.cgroup import MemoryCgroup

ASK_S = 30.0
"""Beginning and entering a cgroup may have to wait for systemd."""
END_S = 60.0
"""For processes that do not die at once."""


class RefusedError(InfiniswapError):
    """What the device answered; carries its exit code."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code  # type: ignore[misc]


def ask(paths: DevicePaths, question: Ask, *, wait_s: float = ASK_S) -> Reply:
    """Asks the device one question.

    Raises:
        NotPermittedError: this process is not in the group.
        NotFoundError: no such device, or one that has nothing for members.
        ConflictError: it does not answer; FrozenError: it cannot.
        RefusedError: its refusal.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(wait_s)
        try:
            sock.connect(str(paths.member_socket))
            check_runs(paths, sock)
            sock.sendall(msgspec.json.encode(question) + b"\n")
            data = _receive(sock)
            reply = cleaned(decode_json(data, Reply))
        except PermissionError as error:
            raise _not_a_member(paths) from error
        except FileNotFoundError as error:
            raise _no_socket(paths) from error
        except (OSError, NotJsonError) as error:
            raise ConflictError(
                f"the device process does not answer ({error or type(error).__name__})",
                where=str(paths.member_socket),
                mend="It may be starting or stopping, or have too many to answer to: try again.",
            ) from error
    if reply.error:
        raise RefusedError(reply.error, reply.exit_code)
    return reply


def _receive(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < ANSWER_BYTES_MAX:
        chunk = sock.recv(65536)
        if not chunk:
            break
        data += chunk
    return data


def _not_a_member(paths: DevicePaths) -> NotPermittedError:
    user, group = _user_name(), _group_of(paths.member_socket)
    try:
        enlisted = user in grp.getgrnam(group).gr_mem
    except KeyError:
        enlisted = False
    mend = (
        "You have been made one since you logged in: log in again."
        if enlisted
        else f"Become one: sudo usermod -aG {group} {user}, then log in again. Or run it with sudo."
    )
    return NotPermittedError(
        f"only root and members of the group {group} may use this device",
        where=f"device {paths.name}",
        mend=mend,
    )


def _no_socket(paths: DevicePaths) -> InfiniswapError:
    if paths.socket.exists():
        return NotPermittedError(
            "only root may use this device: it was started for nobody else, or when there was no "
            "such group",
            where=f"device {paths.name}",
            mend="An administrator makes the group (groupadd --system infiniswap, or "
            "`infiniswap service install`) and restarts the device.",
        )
    known = ", ".join(running_names(paths.run.parent)) or "none"
    return NotFoundError(
        f"no device named {paths.name} is running",
        where=str(paths.run.parent),
        mend=f"Running devices: {known}. `infiniswap device start` makes one, as root.",
    )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _group_of(path: Path) -> str:
    try:
        return grp.getgrgid(group_of(path)).gr_name
    except (OSError, KeyError):
        return "infiniswap"


def status(paths: DevicePaths, *, wait_s: float = ASK_S) -> DeviceStatus:
    """Everything the device tells of itself. Raises: see ask."""
    found = ask(paths, AskStatus(), wait_s=wait_s).status
    if found is None:
        raise ConflictError("the device process has not answered", where=str(paths.member_socket))
    return found


@dataclass(frozen=True, slots=True)
class MemberCgroup(MemoryCgroup):
    """A job's cgroup that the device has made for this process, and changes on its behalf.

    Attributes:
        paths: of the device.
        run: pid of the `infiniswap run`.
    """

    paths: DevicePaths
    run: int

    def add(self, pid: int) -> None:
        """Moves the calling process, which has to be `pid`. Raises: see ask."""
        assert pid == os.getpid()
        ask(self.paths, AskEnter(run=self.run))

    def set_limit(self, limit_bytes: int) -> None:
        """Raises the limit; the device lowers none. Raises: see ask."""
        ask(self.paths, AskRaise(local_bytes=limit_bytes))

    def kill(self, *, timeout_s: float = 10.0) -> None:
        """As MemoryCgroup.kill; where the device does not answer, as far as this user may."""
        try:
            ask(self.paths, AskKill(), wait_s=max(timeout_s, END_S))
        except (ConflictError, NotFoundError, RefusedError):
            self.kill_of(os.getuid(), timeout_s=timeout_s)

    def remove(self, *, timeout_s: float = 10.0) -> None:
        """Ends the run. A cgroup that its device has left behind is root's to remove."""
        try:
            ask(self.paths, AskEnd(), wait_s=max(timeout_s, END_S))
        except (ConflictError, NotFoundError):
            if self.path.exists():
                raise


def begin(paths: DevicePaths, local_bytes: int) -> MemberCgroup:
    """Joins the device, with a cgroup for this process's job. Raises: see ask."""
    reply = ask(paths, AskBegin(local_bytes=local_bytes))
    return MemberCgroup(Path(reply.cgroup), reply.version, paths, os.getpid())
