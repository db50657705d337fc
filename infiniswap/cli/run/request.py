# SPDX-License-Identifier: Apache-2.0
"""What was asked of a run: its arguments, the file of its summary, the signals that end it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from infiniswap.cli.run.far import FarPaging
from infiniswap.cli.run.live_line import say
from infiniswap.device.jobs import sudo
from infiniswap.device.jobs.summary import Summary
from infiniswap.errors import UsageError
from infiniswap.system.cgroup import MemoryCgroup


class Follower(Protocol):
    """Watches the job of a run: `infiniswap plan` does."""

    def look(self, cgroup: MemoryCgroup) -> bool:
        """Called often while the job runs; True ends the job."""

    def ended(self, summary: Summary) -> None:
        """Called at the end, unless the device has gone."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What was asked for.

    Attributes:
        is_member: not root: the device's process does what needs root.
        follower: of the job.
        needs_donors: whether one must answer.
        far: what --paging far has found; None: swap alone.
    """

    args: argparse.Namespace
    command: list[str]
    user: sudo.User | None
    is_member: bool
    local_bytes: int
    summary_file: SummaryFile | None
    follower: Follower | None = None
    needs_donors: bool = True
    far: FarPaging | None = None

    @property
    def goes_far(self) -> bool:
        """Whether the device needs far memory for the job."""
        return self.far is not None and not self.far.unfit


class SummaryFile:
    """The file of --summary-json. It is opened before anything is set up, so that a wrong name
    fails early."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.written = False

    def write(self, summary: dict[str, object]) -> None:
        """Writes it; a full disk is reported, and does not change the exit code."""
        data = (json.dumps(summary, indent=2) + "\n").encode()
        try:
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, 0)
            with os.fdopen(os.dup(self._fd), "wb") as file:
                file.write(data)
            self.written = True
        except OSError as error:
            say(f"the summary could not be written: {error.strerror}")


def check_summary_file(name: str | None, user: sudo.User | None) -> None:
    """As open_summary_file, without making or opening it.

    Raises:
        UsageError: it cannot be written.
    """
    if name is None:
        return
    with sudo.acting_as(user):
        place = name if os.path.lexists(name) else os.path.dirname(os.path.abspath(name))
        is_directory = os.path.isdir(name)
        # By the effective user: the one that writes it.
        may = os.access(place, os.W_OK, effective_ids=True) and not is_directory
    if not may:
        code = errno.EISDIR if is_directory else errno.EACCES
        code = code if os.path.lexists(place) else errno.ENOENT
        raise _unwritable(name, OSError(code, os.strerror(code)))


def _unwritable(name: str, error: OSError) -> UsageError:
    return UsageError(
        f"--summary-json cannot be written: {error.strerror}",
        where=name,
        mend="Name a file in a directory that you may write to.",
    )


@contextlib.contextmanager
def open_summary_file(name: str | None, user: sudo.User | None) -> Iterator[SummaryFile | None]:
    """The file of --summary-json. One that was made here and not written is removed.

    Raises:
        UsageError: it cannot be written.
    """
    if name is None:
        yield None
        return
    with sudo.acting_as(user):
        is_new = not os.path.lexists(name)
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
        except OSError as error:
            raise _unwritable(name, error) from error
    file = SummaryFile(fd)
    try:
        yield file
    finally:
        os.close(fd)
        if is_new and not file.written:
            with contextlib.suppress(OSError), sudo.acting_as(user):
                os.unlink(name)


class EndingSignal(BaseException):
    """SIGTERM or SIGHUP while there is no job to hand it on to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise_ending_signal(number: int, _frame: FrameType | None) -> None:
    raise EndingSignal(number)


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise EndingSignal, unless they are ignored."""
    previous = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            previous[number] = signal.signal(number, _raise_ending_signal)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
