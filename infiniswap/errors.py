# SPDX-License-Identifier: Apache-2.0
"""Every error that crosses a module border, and the exit code each one ends the program with.

The exit codes are a promise to scripts: a code is never reused for another meaning.

====  ===========================  ==========================================================
code  class                        meaning
====  ===========================  ==========================================================
0     (none)                       success
1     InfiniswapError              any error without a class of its own
2     UsageError                   wrong arguments on the command line
3     ConfigError                  wrong configuration file, environment variable or secret file
4     NotPermittedError            needs root or a capability
5     UnavailableError             this host or this build lacks a requested feature
6     NoDonorError                 no donor (or inviting host) named, or none reachable
7     DonorRefusedError            a donor refused: slab size, version, secret, token, protocol
8     BackupError                  the backup file or device cannot be used
9     ConflictError                name in use, already running, already attached
10    SystemCallError              the kernel refused something that should have worked
11    NotFoundError                no such device, donor or file
12    EngineError                  the C library reported an error
13    MemoryLimitError             not enough memory, or a memory limit was reached
14    DeadlineError                an operation did not finish within its deadline
15    CheckFailedError             a check of results failed (the demo's floors)
====  ===========================  ==========================================================

`infiniswap run` passes its command's own exit code through (128 + N for signal N), so there these
codes only mean Infiniswap itself when a message starting with `infiniswap:` was printed.
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar

from infiniswap import rights


class InfiniswapError(Exception):
    """Base of all. The text says what happened, where, and how to mend it.

    Args:
        what: what went wrong, one sentence without the closing full stop.
        where: the thing it happened to: a file, an address, an option. May be empty.
        mend: what the reader can do about it, whole sentences. May be empty.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        super().__init__(what, where, mend)
        self.what = what
        self.where = where
        self.mend = mend

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.mend:
            text = text.rstrip(".") + ". " + self.mend
        return text


class UsageError(InfiniswapError):
    """Wrong arguments."""

    exit_code = 2


class ConfigError(InfiniswapError):
    """Wrong configuration, found before anything was attached."""

    exit_code = 3


class NotPermittedError(InfiniswapError):
    """Needs root or a capability that this process lacks."""

    exit_code = 4


class UnavailableError(InfiniswapError):
    """This host or this build lacks what was asked for (FUSE, a module, a cgroup controller)."""

    exit_code = 5


class NoDonorError(InfiniswapError):
    """No donor was named, or none of those named could be reached."""

    exit_code = 6


class DonorBusyError(NoDonorError):
    """A donor was reached, and takes no further connection."""


class SessionLostError(NoDonorError):
    """An open control session with a donor ended."""


class DonorRefusedError(InfiniswapError):
    """A donor was reached and said no."""

    exit_code = 7


class RequestRefusedError(DonorRefusedError):
    """A donor refused one request of an open session.

    Attributes:
        reason: one of infiniswap.control.messages.REFUSED_REASONS.
    """

    def __init__(self, what: str, *, where: str = "", mend: str = "", reason: str = "") -> None:
        super().__init__(what, where=where, mend=mend)
        self.reason = reason


class WrongSecretError(DonorRefusedError):
    """The two ends do not share the cluster secret."""


class WrongCertificateError(DonorRefusedError):
    """One end does not accept the certificate of the other one, or asks for one in vain."""


class ProtocolMismatchError(DonorRefusedError):
    """The service that answered is no Infiniswap daemon, or has another protocol version."""


class SlabSizeMismatchError(DonorRefusedError):
    """The donor lends slabs of another size."""


class BackupError(InfiniswapError):
    """The backup cannot be created, read or written."""

    exit_code = 8


class ConflictError(InfiniswapError):
    """Something of that name exists or is in use."""

    exit_code = 9


class SystemCallError(InfiniswapError):
    """The kernel refused something.

    Attributes:
        code: the errno value; 0 without one (a command that failed).
    """

    exit_code = 10

    def __init__(self, what: str, *, where: str = "", mend: str = "", code: int = 0) -> None:
        super().__init__(what, where=where, mend=mend)
        self.code = code


class NotFoundError(InfiniswapError):
    """No such device, donor or file."""

    exit_code = 11


class EngineError(InfiniswapError):
    """The C library reported an error.

    Attributes:
        code: positive errno value.
    """

    exit_code = 12

    def __init__(self, what: str, *, where: str = "", mend: str = "", code: int = 0) -> None:
        super().__init__(what, where=where, mend=mend)
        self.code = code


class MemoryLimitError(InfiniswapError):
    """Not enough memory, or a memory limit that ran out."""

    exit_code = 13


class DeadlineError(InfiniswapError):
    """Something did not happen in its time."""

    exit_code = 14


class CheckFailedError(InfiniswapError):
    """A result is not what it has to be."""

    exit_code = 15


def from_oserror(
    what: str, error: OSError, *, where: str = "", mend: str = ""
) -> NotPermittedError | SystemCallError:
    """Turns an OSError into the error to raise: a bare one never crosses a module border.

    Args:
        what: what was being done, e.g. "cannot attach a loop device".
        error: the failure; its file name is used when `where` is empty.
        where: see InfiniswapError.
        mend: see InfiniswapError; with EPERM and EACCES what this process lacks, when empty.
    """
    code = error.errno or 0
    reason = os.strerror(code) if code else str(error)
    text = f"{what}: {reason}"
    if not where and error.filename is not None:
        where = (
            os.fsdecode(error.filename)
            if isinstance(error.filename, bytes)
            else str(error.filename)
        )
    if code in (errno.EPERM, errno.EACCES):
        capability = "CAP_SYS_ADMIN" if code == errno.EPERM else "CAP_DAC_OVERRIDE"
        return NotPermittedError(text, where=where, mend=mend or rights.mend(capability))
    return SystemCallError(text, where=where, mend=mend, code=code)


def is_utf8(text: str) -> bool:
    """Whether text from outside (a file's name, a variable) is all UTF-8. Python keeps other bytes
    as surrogates, which no file of ours can hold."""
    return not any("\udc80" <= character <= "\udcff" for character in text)


def not_utf8(text: str) -> UsageError:
    """Such text would have to be written down."""
    return UsageError(
        f"{text!a} is not UTF-8",
        mend="Use a name in UTF-8: configurations and the records of devices hold nothing else.",
    )
