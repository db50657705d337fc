# SPDX-License-Identifier: Apache-2.0
"""Asks a running device over its Unix socket. Blocking; for commands, not for event loops."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from infiniswap.control.text import cleaned
from infiniswap.device.api import (
    ANSWER_BYTES_MAX,
    DEVICE_PATH,
    LEAVE_PATH,
    RELOAD_PATH,
    RESTART_PATH,
    RUNS_PATH,
    STOP_PATH,
    DeviceAnswer,
    DeviceStatus,
    JoinRequest,
    LeaveRequest,
    ReloadAnswer,
    ReloadRequest,
    RestartRequest,
    StopRequest,
)
from infiniswap.device.control import member_client
from infiniswap.device.control.frozen import check_runs
from infiniswap.device.spec.rundir import DevicePaths, is_running, log_hint
from infiniswap.errors import ConflictError, DeadlineError, InfiniswapError, NotPermittedError
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.system.process import peer_credentials, pidfd_ended

ASK_S = 5.0
STOP_S = 3600.0
"""A swapoff reads everything back in."""
END_S = 10.0
"""For the end of a process that has stopped its device."""
RESTART_S = 300.0
"""A new interpreter has to be started and locked."""
RELOAD_S = 30.0
TAKE_OVER_S = 30.0
"""How long a successor may take until it answers."""
_PAUSE_S = 0.05

BodyT = TypeVar("BodyT")


class DeviceError(InfiniswapError):
    """What the device process answered; carries its exit code."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code  # type: ignore[misc]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _ask(
    paths: DevicePaths,
    method: str,
    path: str,
    body: Struct | None,
    kind: type[BodyT],
    wait_s: float,
    on_asked: Callable[[socket.socket], None] | None = None,
) -> BodyT:
    connection = _UnixConnection(paths.socket, wait_s)
    try:
        payload = None if body is None else msgspec.json.encode(body)
        connection.connect()
        check_runs(paths, connection.sock)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        if on_asked is not None:
            on_asked(connection.sock)
        with connection.getresponse() as response:
            data = response.read(ANSWER_BYTES_MAX + 1)
        if len(data) > ANSWER_BYTES_MAX:
            raise http.client.HTTPException(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        if response.status != 200:
            answer = cleaned(decode_json(data, DeviceAnswer))
            raise DeviceError(answer.error, answer.exit_code)
        return cleaned(decode_json(data, kind))
    except PermissionError as error:
        raise NotPermittedError(
            "only root may talk to devices", where=str(paths.socket), mend="Run it with sudo."
        ) from error
    except (OSError, http.client.HTTPException, NotJsonError) as error:
        raise ConflictError(
            f"the device process does not answer ({error or type(error).__name__})",
            where=str(paths.socket),
            mend=f"It may be starting or stopping. {log_hint(paths, stays=False)}".rstrip(),
        ) from error
    finally:
        connection.close()


def status(paths: DevicePaths, *, wait_s: float = ASK_S) -> DeviceStatus:
    """Everything the device tells of itself, within `wait_s` seconds.

    Members of the device's group may ask, too.

    Raises:
        ConflictError: it does not answer.
        NotPermittedError: neither root nor a member.
    """
    if os.geteuid() != 0 and os.path.exists(paths.member_socket):
        return member_client.status(paths, wait_s=wait_s)
    return _ask(paths, "GET", DEVICE_PATH, None, DeviceStatus, wait_s)


def status_patiently(paths: DevicePaths, *, wait_s: float = TAKE_OVER_S) -> DeviceStatus:
    """As status; a device whose process has just died is given time for its take-over.

    Raises:
        ConflictError: it does not answer, and does not run or has had `wait_s` seconds.
        NotPermittedError: not root.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return status(paths)
        except ConflictError:
            if time.monotonic() >= end_s or not is_running(paths):
                raise
        time.sleep(_PAUSE_S)


def restart(paths: DevicePaths) -> DeviceStatus:
    """Has the device's process replaced by one of the code that is installed now.

    Returns:
        The status that the new process gives.

    Raises:
        DeviceError: refused; nothing has changed. Others: see status.
        DeadlineError: the new process does not answer.
    """
    before = status(paths)
    _ask(paths, "POST", RESTART_PATH, RestartRequest(), DeviceAnswer, RESTART_S)
    end_s = time.monotonic() + RESTART_S
    while time.monotonic() < end_s:
        after = status_patiently(paths, wait_s=RESTART_S)
        if after.pid != before.pid:
            return after
        time.sleep(_PAUSE_S)
    raise DeadlineError(
        "the new process has not taken over",
        where=str(paths.run),
        mend=log_hint(paths, stays=True),
    )


def reload(paths: DevicePaths) -> ReloadAnswer:
    """Has the device read its configuration again.

    Raises:
        DeviceError: there is a mistake in it; nothing has changed. Others: see status.
    """
    return _ask(paths, "POST", RELOAD_PATH, ReloadRequest(), ReloadAnswer, RELOAD_S)


def join(paths: DevicePaths, pid: int) -> None:
    """Registers a `run`.

    Raises:
        DeviceError: refused. Others: see status.
    """
    _ask(paths, "POST", RUNS_PATH, JoinRequest(pid=pid), DeviceAnswer, ASK_S)


def leave(paths: DevicePaths, pid: int, *, wait: bool = True) -> None:
    """Ends a `run`; returns when a device that is no longer used has stopped, or at once.

    Raises:
        DeviceError: it cannot be stopped. Others: see status.
    """
    request = LeaveRequest(pid=pid, wait=wait)
    try:
        _ask(paths, "POST", LEAVE_PATH, request, DeviceAnswer, STOP_S)
    except ConflictError:
        status_patiently(paths)  # its process may just have died, and another one taken over
        _ask(paths, "POST", LEAVE_PATH, request, DeviceAnswer, STOP_S)


def stop(paths: DevicePaths, *, remove: bool) -> None:
    """Stops the device; returns when its process has ended.

    Raises:
        DeviceError: it is still in use. Others: see status.
    """
    pidfds: list[int] = []

    def watch(pid: int) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            pidfds.append(os.pidfd_open(pid))

    def watch_peer(sock: socket.socket) -> None:
        watch(peer_credentials(sock)[0])

    try:
        request = StopRequest(remove=remove)
        answer = _ask(paths, "POST", STOP_PATH, request, DeviceAnswer, STOP_S, watch_peer)
        if answer.holder_pid is not None:
            watch(answer.holder_pid)
        for pidfd in pidfds:
            pidfd_ended(pidfd, END_S)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
