# SPDX-License-Identifier: Apache-2.0
"""Where log lines go: to the journal with their fields, or as plain lines to standard error.

The journal's native protocol (systemd, "Native Journal Protocol") is one datagram of `NAME=value`
lines. A datagram that the journal does not take at once is dropped and counted: a process that
serves swap space must not wait for one that may be swapped out, nor for the file of its log, which
may be swapped out as well. Lines of one kind are limited in their rate, wherever they go.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from infiniswap import events

SOCKET: Final = Path("/run/systemd/journal/socket")
BURST: Final = 100
"""Lines of one kind (the same event, else the same words) within WINDOW_S."""
WINDOW_S: Final = 30.0
_KINDS_MAX: Final = 512
_TEXT_BYTES_MAX: Final = 32 * 1024
"""Of a message: a datagram has to fit into the socket's buffer."""
_PLAIN: Final = "%(asctime)s %(levelname)s %(message)s"
_LINES_MAX: Final = 1000
"""That wait to be written."""
_PATIENCE_S: Final = 0.05
_END_S: Final = 2.0


def is_journal(environ: Mapping[str, str] | None = None, fd: int = 2) -> bool:
    """Whether that descriptor leads to the journal, as JOURNAL_STREAM tells (systemd.exec(5))."""
    device, _, inode = (
        (os.environ if environ is None else environ).get("JOURNAL_STREAM", "").partition(":")
    )
    if not (device.isdecimal() and inode.isdecimal()):
        return False
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (int(device), int(inode))


def set_up(
    identifier: str, level: int = logging.INFO, *, to_journal: bool, waits: bool = True
) -> None:
    """Sends the log lines of this process where they belong.

    Args:
        identifier: the journal's SYSLOG_IDENTIFIER.
        level: of the least important lines.
        to_journal: by its own protocol; otherwise plain lines to standard error.
        waits: who logs a plain line may wait until it is written.
    """
    root = logging.getLogger()
    handler: logging.Handler
    if to_journal:
        handler = JournalHandler(identifier)
    else:
        handler = logging.StreamHandler(sys.stderr) if waits else AsideHandler()
        handler.setFormatter(PlainFormatter(_PLAIN))
    handler.addFilter(LogRateLimit())
    root.addHandler(handler)
    root.setLevel(level)


def identify(device: str) -> None:
    """Every line of this process is about that device from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, JournalHandler):
            handler.fields["INFINISWAP_DEVICE"] = device


def hold(before: bytes = b"") -> None:
    """Plain lines wait in memory from now on: writing one could wait for what they tell about.

    Args:
        before: lines of somebody else, to be written before them.
    """
    for handler in _aside():
        handler.hold_back(before)


def release() -> None:
    """They are written."""
    for handler in _aside():
        handler.go_on()


def held() -> bytes:
    """Those that wait, for somebody else to write."""
    return b"".join(handler.take() for handler in _aside())


def _aside() -> list[AsideHandler]:
    return [each for each in logging.getLogger().handlers if isinstance(each, AsideHandler)]


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    """What `events.about` has given to a record."""
    found = getattr(record, events.FIELD, None)
    return found if isinstance(found, dict) else {}


class PlainFormatter(logging.Formatter):
    """A line, with the event's id at its end."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        name = fields_of(record).get("INFINISWAP_EVENT")
        text = super().format(record)
        if not name:
            return text
        head, newline, rest = text.partition("\n")  # a traceback comes after the line
        return f"{head} [{name}]{newline}{rest}"


class AsideHandler(logging.Handler):
    """Writes plain lines to a descriptor in a thread of its own, so that nobody has to wait for it.

    The last page of a log in /run may have been swapped out to the very device whose process logs,
    and the reader of a pipe may wait for that device. A line is written when `emit` returns, unless
    that takes longer than a moment; what does not fit into the memory for lines is counted.
    """

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd
        self._lines: deque[tuple[bytes, int]] = deque()  # and how many are lost with it
        self._lost = 0
        self._tail: mmap.mmap | None = None
        self._is_held = self._is_writing = self._is_stuck = self._is_closing = False
        # The handler's own: with two locks a finaliser that logs in our thread closes a circle.
        self._changed = threading.Condition(self.lock)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            line = f"{self.format(record)}\n".encode(errors="replace")
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) >= _LINES_MAX:
                self._lost += 1
                return
            self._tell_lost()
            self._lines.append((line, 1))
            self._changed.notify_all()
            if not (self._is_held or self._is_stuck):
                self._is_stuck = not self._drained(_PATIENCE_S)

    def _tell_lost(self) -> None:
        if self._lost:
            told = f"{self._lost} log lines were lost, as the log did not take them"
            self._lines.append((f"{told} [{events.LINES_LOST.name}]\n".encode(), self._lost))
            self._lost = 0

    def hold_back(self, before: bytes = b"") -> None:
        """Writes nothing until it is told to; then first of all `before`."""
        with self._changed:
            self._is_held = True
            if before:
                self._lines.appendleft((before, before.count(b"\n")))

    def go_on(self) -> None:
        """Writes again."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()
            self._is_stuck = not self._drained(_PATIENCE_S)

    def take(self) -> bytes:
        """What is held; nothing is left of it here."""
        with self._changed:
            if not self._is_held:
                return b""
            self._tell_lost()
            taken = b"".join(line for line, _ in self._lines)
            self._lines.clear()
            return taken

    def _drained(self, wait_s: float) -> bool:
        return self._changed.wait_for(lambda: not (self._lines or self._is_writing), wait_s)

    def _is_due(self) -> bool:
        return self._is_closing or bool(self._lines and not self._is_held)

    def _run(self) -> None:
        lost = 0
        while True:
            with self._changed:
                self._lost += lost
                self._is_writing = False
                self._is_stuck = self._is_stuck and bool(self._lines)
                self._changed.notify_all()
                self._changed.wait_for(self._is_due)
                if self._is_closing:
                    return
                line, count = self._lines.popleft()
                self._is_writing = True
            lost = 0
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:  # its disk is full, or nobody reads it
                lost = count
            self._keep_tail()

    def _keep_tail(self) -> None:
        """The last page of the file stays in memory as long as this process, where everything that
        is mapped is locked: neither the next line nor the end of the process waits for it."""
        with contextlib.suppress(OSError, ValueError):  # it is no file
            end = os.fstat(self._fd).st_size
            begin = max(end - 1, 0) // mmap.PAGESIZE * mmap.PAGESIZE
            self._tail = mmap.mmap(self._fd, end - begin, prot=mmap.PROT_READ, offset=begin)

    def close(self) -> None:
        """See logging.Handler. What cannot be written in a moment is lost."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()
            self._drained(_END_S)
            self._is_closing = True
            self._changed.notify_all()
        super().close()


class LogRateLimit(logging.Filter):
    """Lets `burst` lines of each kind pass per `window_s` seconds; the first one after that says
    how many were left out."""

    def __init__(self, burst: int = BURST, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._seen: dict[str, list[float]] = {}  # kind: begin of its window, lines, left out

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter. The time is the record's own."""
        kind = fields_of(record).get("INFINISWAP_EVENT") or str(record.msg)
        state = self._seen.get(kind)
        if state is None:
            if len(self._seen) >= _KINDS_MAX:
                self._seen.pop(next(iter(self._seen)))
            state = self._seen[kind] = [record.created, 0, 0]
        if not 0 <= record.created - state[0] < self._window_s:
            left_out = int(state[2])
            state[:] = [record.created, 0, 0]
            if left_out:
                record.msg = f"{record.getMessage()} ({left_out} more like it were left out)"
                record.args = ()
        state[1] += 1
        state[2] += state[1] > self._burst
        return state[1] <= self._burst


class JournalHandler(logging.Handler):
    """Sends each record as one datagram, and never waits.

    Attributes:
        fields: of every line.
        lost: lines that the journal did not take, and of which it has not been told.
    """

    def __init__(self, identifier: str, path: Path = SOCKET) -> None:
        super().__init__()
        self.fields = {"SYSLOG_IDENTIFIER": identifier}
        self.lost = 0
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            fields = {"PRIORITY": _priority(record.levelno), "LOGGER": record.name}
            message = self.format(record).encode(errors="replace")[:_TEXT_BYTES_MAX]
            fields |= self.fields | fields_of(record)
            data = encode({"MESSAGE": message} | {k: v.encode() for k, v in fields.items()})
        except Exception:
            self.handleError(record)
            return
        if self.lost and self._send(self._about_lost()):
            self.lost = 0
        if not self._send(data):
            self.lost += 1

    def _about_lost(self) -> bytes:
        fields = {
            "MESSAGE": f"{self.lost} log lines were lost, as the journal did not take them",
            "PRIORITY": _priority(logging.WARNING),
        }
        fields |= self.fields | events.about(events.LINES_LOST)[events.FIELD]
        return encode({name: value.encode() for name, value in fields.items()})

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.sendto(data, self._path)
        except OSError:  # full, or journald is just being restarted
            return False
        return True

    def close(self) -> None:
        """See logging.Handler."""
        with contextlib.suppress(OSError):
            self._socket.close()
        super().close()


def encode(fields: Mapping[str, bytes]) -> bytes:
    """A datagram of the journal's native protocol."""
    parts = []
    for name, value in fields.items():
        key = name.encode("ascii")
        if b"\n" in value:
            parts += [key, b"\n", struct.pack("<Q", len(value)), value, b"\n"]
        else:
            parts += [key, b"=", value, b"\n"]
    return b"".join(parts)


def _priority(level: int) -> str:
    """syslog's, of Python's."""
    for least, priority in (
        (logging.CRITICAL, "2"),
        (logging.ERROR, "3"),
        (logging.WARNING, "4"),
        (logging.INFO, "6"),
    ):
        if level >= least:
            return priority
    return "7"
