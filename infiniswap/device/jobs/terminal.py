# SPDX-License-Identifier: Apache-2.0
"""A terminal of its own for a job of another user; docs/adr/0031-terminal-of-its-own.md has why.

The runner stays with the user's terminal, and carries bytes between that and a pseudo-terminal. Its
child, the leader (`leader`), leads the pseudo-terminal's session. The job is the leader's
child in a process group of its own: the kernel lets Ctrl-Z stop a job only where its parent is in
the same session and in another group.

While the job has the keyboard the user's terminal is raw: the job's does what that one did.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import termios
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from infiniswap.device.jobs.leader import (
    MESSAGE_BYTES_MAX,
    Attributes,
    Continue,
    JobEnded,
    Leader,
    Order,
    Released,
    Report,
    Signal,
    Stopped,
    Taken,
    is_set,
)
from infiniswap.errors import from_oserror
from infiniswap.system.signals import poll

_CHUNK_BYTES: Final = 65536
_DRAIN_BYTES_MAX: Final = 1 << 20
_WRITE_S_MAX: Final = 5.0
_KEYS: Final = {termios.VINTR: signal.SIGINT, termios.VQUIT: signal.SIGQUIT}
_RAW_INPUT: Final = (
    termios.BRKINT
    | termios.ICRNL
    | termios.IGNBRK
    | termios.IGNCR
    | termios.INLCR
    | termios.INPCK
    | termios.ISTRIP
    | termios.IXON
    | termios.PARMRK
)
_RAW_LOCAL: Final = termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN | termios.ISIG


class JobTerminal:
    """The runner's end of it.

    Args:
        terminal: the user's, opened with O_NONBLOCK. Taken.
        uid: the user that will own the job's terminal.

    Raises:
        SystemCallError: there can be no pseudo-terminal.
    """

    def __init__(self, terminal: int, uid: int) -> None:
        self._terminal = terminal
        self._is_gone = False
        self._has_keyboard = False
        self._saved: Attributes = []
        self._raw: Attributes = []
        self._to_job = self._to_terminal = b""
        self._turn = 0
        self.on_stop: Callable[[], None] = lambda: None  # called before this process stops itself
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._leader, self._leaders_end = ends
        self._primary = self._secondary = -1
        try:
            self._primary, self._secondary = os.openpty()
            os.fchown(self._secondary, uid, -1)
            os.set_blocking(self._primary, False)
            self._give(termios.tcgetattr(terminal))
        except (OSError, termios.error) as error:
            self.close()
            code = error.args[0]
            raise from_oserror(
                "cannot make a terminal for the command",
                OSError(code, os.strerror(code)),
                mend="It needs /dev/pts, mounted, with a free terminal.",
            ) from error
        self._copy_size()
        # In a pipeline another program may want the keyboard: there the job gets it when it reads.
        self._starts_foreground = _is_ours(0) and not _is_pipe(1) and self._is_foreground()

    def standard_streams(self) -> tuple[int | None, int | None, int | None]:
        """The job's: its terminal in place of the user's, None for one that is something else."""
        stdin, stdout, stderr = (self._secondary if _is_ours(fd) else None for fd in range(3))
        return stdin, stdout, stderr

    def enter(self) -> int:
        """In the runner's child: returns in a child of that, which becomes the job. The runner's
        child is the leader from here on, ends as the job ends, and never returns.

        Returns:
            The leader's pid.
        """
        os.setsid()
        fcntl.ioctl(self._secondary, termios.TIOCSCTTY, 0)
        leader_pid, job_pid = os.getpid(), os.fork()
        foreground = self._starts_foreground
        if job_pid != 0:
            try:
                Leader(
                    job_pid,
                    self._terminal,
                    self._secondary,
                    self._leaders_end,
                    foreground=foreground,
                ).run()
            finally:
                os._exit(1)
        os.setpgid(0, 0)
        if foreground:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            os.tcsetpgrp(self._secondary, os.getpid())
        return leader_pid

    def started(self) -> None:
        """The job runs."""
        self._leaders_end.close()
        os.close(self._secondary)
        self._secondary = -1
        if self._starts_foreground:
            self._take_keyboard()

    # ------------------------------------------------------------------- while it runs

    def wanted(self) -> dict[int, int]:
        """What to wait for, as for `poll`."""
        if self._leader.fileno() < 0:
            return {}
        wanted = {self._leader.fileno(): select.POLLIN}
        reads = self._has_keyboard and not self._to_job
        for fd, reading, writing in (
            (self._primary, not self._to_terminal, self._to_job),
            (self._terminal, reads, self._to_terminal),
        ):
            if events := (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0):
                wanted[fd] = events
        return wanted

    def serve(self, ready: Mapping[int, int]) -> None:
        """Carries what is there; stops this process where the job was stopped."""
        if self._leader.fileno() < 0:
            return
        if self._terminal in ready:
            self._put()
            self._read_keyboard()
        if self._primary in ready:
            self._feed()
            if not self._to_terminal:
                self._to_terminal = self._written()
                self._put()
        if self._leader.fileno() in ready:
            for report in self._reports():
                if isinstance(report, Stopped):
                    self._job_stopped(report)
                else:
                    self.end()

    def hand_on(self, number: signal.Signals, *, group: bool) -> None:
        """A signal for the job, or for its whole process group."""
        if number is signal.SIGWINCH:
            self._copy_size()  # of which the kernel tells the job
        elif number is signal.SIGCONT:
            self._continue()
        else:
            self._order(Signal(number, group))
            if number is signal.SIGTSTP and not self._suspend(number, group=False):
                self._continue()

    def end(self) -> None:
        """Shows what the job has written, gives the user's terminal back as it was, and lets the
        leader end. Idempotent."""
        if self._leader.fileno() >= 0:
            if self._primary >= 0:
                self._flush()
            self._release()
            self._leader.close()

    def close(self) -> None:
        """Idempotent."""
        self.end()
        self._leaders_end.close()
        for fd in (self._terminal, self._primary, self._secondary):
            if fd >= 0:
                os.close(fd)
        self._terminal = self._primary = self._secondary = -1

    # ------------------------------------------------------------------------- keyboard

    def _is_foreground(self) -> bool:
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        return False

    def _take_keyboard(self) -> None:
        """Where the user's terminal is ours to use now. Again, where a shell has set it while this
        process was stopped by SIGSTOP."""
        if not self._is_foreground():
            return
        with contextlib.suppress(termios.error):
            if self._has_keyboard and is_set(self._terminal, self._raw):
                return
            self._saved = termios.tcgetattr(self._terminal)
            # Not if it is as it was: what the job sets meanwhile would be undone.
            if self._saved != self._source and termios.tcgetattr(self._primary) == self._given:
                self._give(self._saved)  # the job has not set its own
            self._raw = _made_raw(self._saved)
            self._order(Taken(self._saved, self._raw))
            self._has_keyboard = True
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._raw)

    def _give(self, attributes: Attributes) -> None:
        termios.tcsetattr(self._primary, termios.TCSANOW, attributes)
        self._source = attributes  # which the kernel may have changed in part
        self._given = termios.tcgetattr(self._primary)

    def _release(self) -> None:
        """In the background the terminal is another program's, which has set it as it wants it. So
        is one that is no longer raw: a second run in the same script found it raw, and must not
        leave it so after the first has ended."""
        if self._has_keyboard and self._is_foreground():
            with contextlib.suppress(termios.error):
                if is_set(self._terminal, self._raw):
                    termios.tcsetattr(self._terminal, termios.TCSANOW, self._saved)
        self._has_keyboard = False
        self._order(Released())

    def _read_keyboard(self) -> None:
        if not self._has_keyboard or self._to_job:
            return
        if not self._is_foreground():
            self._release()
            return
        data = _read(self._terminal)
        if data is None and self._is_foreground():  # an end of file, so it is no longer raw
            self._take_keyboard()
            return
        if data is None:
            self._is_gone = True
            self._release()
            return
        _tell_group(self._primary, data)
        self._to_job = data
        self._feed()

    def _copy_size(self) -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetwinsize(self._primary, termios.tcgetwinsize(self._terminal))

    # ------------------------------------------------------------------ stop and continue

    def _order(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._leader.send(msgspec.msgpack.encode(order))

    def _reports(self) -> Iterator[Report]:
        try:
            data = self._leader.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        # Without a word: the leader was killed.
        yield msgspec.msgpack.decode(data, type=Report) if data else JobEnded()

    def _job_stopped(self, stopped: Stopped) -> None:
        if stopped.turn != self._turn:
            return  # and was continued since
        number = signal.Signals(stopped.number)
        wants_terminal = number in (signal.SIGTTIN, signal.SIGTTOU)
        if wants_terminal and self._is_foreground():
            self._continue()
        elif wants_terminal or self._has_keyboard:
            how = number if wants_terminal else signal.SIGTSTP
            if self._suspend(how, group=True):
                return
            if number is signal.SIGTSTP:
                self._continue()
            elif wants_terminal and not self._is_foreground():
                self._hang_up()
            else:
                self._take_keyboard()

    def _hang_up(self) -> None:
        """For a job that wants the terminal in the background of a shell that has gone: nobody can
        bring it to the foreground. On a terminal that they shared the kernel would fail the job's
        read; it would stay stopped here. So it gets what stopped jobs get when their shell goes."""
        self._order(Signal(signal.SIGHUP, True))
        self._continue()

    def _suspend(self, number: signal.Signals, *, group: bool) -> bool:
        """Stops this process by a signal's default action, not SIGSTOP: without a shell that could
        continue us the kernel ignores it, and the answer is False.

        Args:
            number: the signal.
            group: our whole process group is told, as a key of the terminal does.
        """
        self._flush()
        self.on_stop()
        self._release()
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        if group:
            os.killpg(0, number)
        else:
            signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return signal.SIGCONT in signal.sigpending()  # taken next, and handed on

    def _continue(self) -> None:
        self._copy_size()
        if not self._is_foreground():
            self._release()
        self._take_keyboard()
        self._turn += 1
        self._order(Continue(self._turn, self._has_keyboard))

    # ---------------------------------------------------------------------------- bytes

    def _written(self) -> bytes:
        data = _read(self._primary) or b""
        # Each line has its carriage return by now, and a terminal that is not raw adds another.
        return data if self._has_keyboard else data.replace(b"\r\n", b"\n")

    def _feed(self) -> None:
        self._to_job = _write(self._primary, self._to_job)

    def _put(self) -> None:
        self._to_terminal = b"" if self._is_gone else _write(self._terminal, self._to_terminal)

    def _flush(self) -> None:
        """Shows what the job has written until now."""
        left = _DRAIN_BYTES_MAX  # something of the job's may write for ever
        while left > 0:
            if not self._to_terminal:
                self._to_terminal = self._written()
                left -= len(self._to_terminal)
            if not self._to_terminal:
                return
            if not poll({self._terminal: select.POLLOUT}, _WRITE_S_MAX):
                return
            self._put()


def open_terminal(uid: int) -> JobTerminal | None:
    """A terminal for a job of that user; None where this process has none to keep from the job.

    Raises:
        SystemCallError: there can be none, so the job must not run.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise from_oserror("cannot open the terminal of this session", error) from error
    return JobTerminal(terminal, uid)


def is_line_mode(terminal: JobTerminal | None) -> bool:
    """Whether the job leaves lines to its terminal (None: ours), and does not read each key itself.
    A job that does has all of the screen."""
    with contextlib.suppress(termios.error, OSError):
        fd = 2 if terminal is None else terminal._primary
        return bool(termios.tcgetattr(fd)[3] & termios.ICANON)
    return False


def _tell_group(job_terminal: int, typed: bytes) -> None:
    """A key that interrupts reaches all of our process group, as on the user's own terminal: a
    script that has started us, and the others of a pipeline."""
    with contextlib.suppress(termios.error):
        attributes = termios.tcgetattr(job_terminal)
        for key, number in _KEYS.items():
            byte = attributes[6][key]
            if attributes[3] & termios.ISIG and byte != b"\0" and byte in typed:
                os.killpg(0, number)


def _made_raw(attributes: Attributes) -> Attributes:
    raw = [*attributes[:6], list(attributes[6])]
    raw[0] &= ~_RAW_INPUT
    raw[1] &= ~termios.OPOST
    raw[3] &= ~_RAW_LOCAL
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
    return raw


def _is_ours(fd: int) -> bool:
    """Whether it is this session's terminal."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(fd) >= 0  # refused for any other
    return False


def _is_pipe(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _read(fd: int) -> bytes | None:
    """Nothing when nothing is there now, None when nothing can come."""
    try:
        return os.read(fd, _CHUNK_BYTES) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None


def _write(fd: int, data: bytes) -> bytes:
    """The bytes that could not be written yet; none if no process would read them."""
    try:
        return data[os.write(fd, data) :] if data else data
    except BlockingIOError:
        return data
    except OSError:
        return b""
