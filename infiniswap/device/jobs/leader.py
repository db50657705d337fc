# SPDX-License-Identifier: Apache-2.0
"""The process between `run` and a job that has a terminal of its own: it leads the session of that
terminal and is the job's parent. `terminal` says what for.

What it and the runner say to each other over a socket is here, too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import termios
from typing import Any, Final

import msgspec

from infiniswap.system.signals import open_signalfd, poll, take_pending

MESSAGE_BYTES_MAX: Final = 4096

_FLAGS: Final = (0, 1, 3)  # of termios.tcgetattr: input, output, local
_POLL_S: Final = 60.0

Attributes = list[Any]
"""Of a terminal, as termios.tcgetattr has them."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """To the leader: for the job, or for its whole process group."""

    number: int
    group: bool


class Continue(msgspec.Struct, frozen=True, tag=True):
    """To the leader: the job goes on. `turn` counts these."""

    turn: int
    foreground: bool


class Taken(msgspec.Struct, frozen=True, tag=True):
    """To the leader: how the user's terminal was, and how the runner makes it now."""

    saved: Attributes
    raw: Attributes


class Released(msgspec.Struct, frozen=True, tag=True):
    """To the leader: the user's terminal is as it was."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """From the leader: the job was stopped by a signal, after that turn."""

    number: int
    turn: int


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """From the leader: the job has ended, and the terminal should be released if it was taken."""


Order = Signal | Continue | Taken | Released
Report = Stopped | JobEnded


class Leader:
    """The leader's own code.

    Args:
        job_pid: its child, and the number of the job's process group.
        terminal: the user's.
        secondary: the job's.
        end: of the socket.
        foreground: whether the job has been given the foreground of its terminal.
    """

    def __init__(
        self, job_pid: int, terminal: int, secondary: int, end: socket.socket, *, foreground: bool
    ) -> None:
        self._job_pid = job_pid
        self._terminal = terminal
        self._secondary = secondary
        self._socket = end
        self._foreground = foreground
        self._taken: Taken | None = None
        self._exit_code: int | None = None
        self._turn = 0

    def run(self) -> None:
        """Ends this process as the job ends; returns when the runner was killed."""
        self._close_others()
        for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        child = open_signalfd({signal.SIGCHLD})  # blocked, as in the runner
        wanted = {child: select.POLLIN, self._socket.fileno(): select.POLLIN}
        try:
            is_connected = True
            # A terminal that was taken is the runner's to release, or ours if that is killed.
            while is_connected and (self._exit_code is None or self._taken is not None):
                ready = poll(wanted, _POLL_S)
                if child in ready:
                    take_pending({signal.SIGCHLD})
                    self._look()
                if self._socket.fileno() in ready:
                    is_connected = self._hear()
        finally:
            self._undo()
        if self._exit_code is not None:
            _end_as(self._exit_code)

    def _close_others(self) -> None:
        """Keeps a reader that waits for the end of a pipe from waiting for this process."""
        own = {self._terminal, self._secondary, self._socket.fileno()}
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in own:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(fd)

    def _look(self) -> None:
        while self._exit_code is None:
            pid, status = os.waitpid(self._job_pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._say(Stopped(os.WSTOPSIG(status), self._turn))
            else:
                self._exit_code = os.waitstatus_to_exitcode(status)
                self._say(JobEnded())

    def _say(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # the runner was killed, as we shall hear
            self._socket.send(msgspec.msgpack.encode(report))

    def _hear(self) -> bool:
        """False when the runner has hung up, or was killed."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._socket.recv(MESSAGE_BYTES_MAX)
        if not data:
            return False
        order = msgspec.msgpack.decode(data, type=Order)
        if isinstance(order, Taken):
            self._taken = order
        elif isinstance(order, Released):
            self._taken = None
        elif self._exit_code is None:  # else its number may be another process's by now
            self._obey(order)
        return True

    def _obey(self, order: Signal | Continue) -> None:
        if isinstance(order, Signal):
            send = os.killpg if order.group else os.kill
            send(self._job_pid, order.number)
            return
        self._turn = order.turn
        if order.foreground != self._foreground:
            self._foreground = order.foreground
            group = self._job_pid if order.foreground else os.getpgrp()
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._secondary, group)
        os.killpg(self._job_pid, signal.SIGCONT)

    def _undo(self) -> None:
        """Does what a runner that was killed has left undone.

        A terminal that is not as the runner had made it was set by somebody since: shells do so
        when a program was killed.
        """
        if self._taken is not None:
            with contextlib.suppress(termios.error):
                if is_set(self._terminal, self._taken.raw):
                    termios.tcsetattr(self._terminal, termios.TCSANOW, self._taken.saved)
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job_pid, signal.SIGKILL)


def is_set(terminal: int, attributes: Attributes) -> bool:
    """Whether the modes of the terminal are these. Raises termios.error when it has gone."""
    now = termios.tcgetattr(terminal)
    return all(now[flag] == attributes[flag] for flag in _FLAGS)


def _end_as(exit_code: int) -> None:
    """Ends this process as the job has ended: -N for signal N."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-exit_code})
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code & 0xFF)
