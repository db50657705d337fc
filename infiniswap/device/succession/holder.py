# SPDX-License-Identifier: Apache-2.0
"""The device's end of the talk with its holder (csrc/holder/holder.h lists the words).

The holder is the parent of the device's processes: it keeps the descriptors that a successor needs
and tells the standby when to take over. A device without a standby has no holder, and then every
call here does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from infiniswap import events
from infiniswap.errors import ConflictError, InfiniswapError, SystemCallError
from infiniswap.system.process import peer_credentials

log = logging.getLogger(__name__)

SOCKET_FD = 3
SPEC_FD = 4
READY_FD = 5

SPEC = "spec"
STATE = "state"
KEY = "key"
LOCK = "lock"
LOG = "log"
UNSAID = "unsaid"
KILLED = "killed"
"""Reason of a take-over: by SIGKILL."""

RENEW_S_MAX = 240.0
"""The holder gives a new process 180 s."""

_TEXT_BYTES_MAX = 4096
_DESCRIPTORS_MAX = 64


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The holder's order to a standby to take over.

    Attributes:
        count: of take-overs of this device, this one included.
        died_ns: CLOCK_MONOTONIC when the predecessor had ended.
        reason: killed, crashed, exited, restart.
        descriptors: by name; the receiver's to close.
    """

    count: int
    died_ns: int
    reason: str
    descriptors: Mapping[str, int] = field(default_factory=dict)


class HolderGoneError(InfiniswapError):
    """The holder has ended, so nothing can tell a standby that its turn has come."""


class Holder:
    """One process's end of the pair.

    Args:
        fd: of the socket, taken; -1: there is no holder.
    """

    def __init__(self, fd: int = -1) -> None:
        self._socket: socket.socket | None = None
        self.pid: int | None = None
        self.standby = ""
        """"ready", or why there is none; empty: not yet."""
        self.on_standby: Callable[[], None] = lambda: None
        """Called when a standby is ready."""
        self._unheld = ""
        self._renewal: asyncio.Future[None] | None = None
        self._in_memory: dict[str, mmap.mmap] = {}
        self._on_gone: Callable[[], None] = lambda: None
        if fd >= 0:
            self._socket = socket.socket(fileno=fd)
            self.pid, _ = peer_credentials(self._socket)
        self._was_there = self._socket is not None

    @property
    def present(self) -> bool:
        """Whether there is one, and it lives."""
        return self._socket is not None

    @property
    def degraded(self) -> str:
        """What an administrator should know of it; empty is good."""
        if self._was_there and self._socket is None:
            return (
                "holder: the parent process, which would start a successor, has died. If this "
                "process dies, too, the device's contents are lost. Stop the device and start it "
                "again."
            )
        if self._unheld:
            return (
                f"holder: it could not copy the rings of this process ({self._unheld}); on Linux "
                "6.7 to 6.14.5 the kernel may panic if this process is killed. Allow it "
                "(kernel.yama.ptrace_scope below 2), or use the front end nbd."
            )
        if self.standby not in ("", "ready"):
            return (
                f"standby: no second process is ready to take over ({self.standby.rstrip('.')}). "
                "If this process dies now, the device pauses until another one has started. The "
                "holder keeps trying to start one."
            )
        return ""

    # ------------------------------------------------------------------------- saying

    def _say(self, text: str, descriptors: tuple[int, ...] = ()) -> None:
        if self._socket is None:
            return
        try:
            data = text.encode(errors="replace")
            socket.send_fds(self._socket, [data], descriptors, socket.MSG_DONTWAIT)
        except OSError as error:
            log.error("the holder cannot be told %r: %s", text.split()[0], error.strerror)

    def keep(self, name: str, fd: int) -> None:
        """A successor will get a copy of this descriptor, which stays the caller's."""
        self._say(f"keep {name}", (fd,))

    def keep_bytes(self, name: str, data: bytes) -> None:
        """A successor will get a descriptor of a file in memory that holds them."""
        if self._socket is None:
            return
        fd = os.memfd_create(f"infiniswap-{name}", os.MFD_CLOEXEC)
        try:
            os.write(fd, data)
            # Until the holder locks its pages, or for good where it cannot, they could be swapped
            # out to the device itself. All our memory is locked, so a mapping keeps them.
            with contextlib.suppress(OSError):
                self._in_memory[name] = mmap.mmap(fd, len(data), prot=mmap.PROT_READ)
            self.keep(name, fd)
        finally:
            os.close(fd)

    def drop(self, name: str) -> None:
        """The holder closes it."""
        self._say(f"drop {name}")

    def hold_rings(self, fds: Iterable[int]) -> None:
        """The holder gets copies of this process's io_urings: they must not end with it.

        Linux 6.7 to 6.14.5 free the ring of a ublk server that is killed under requests that are
        just being handed over to it, and panic (CVE-2025-37906). No socket carries a ring.
        """
        for fd in fds:
            self._say(f"ring {fd}")

    def serving(self) -> None:
        """From now on the holder answers this process's death with a take-over."""
        self._say("serving")

    def ending(self) -> None:
        """From now on this process's death is the end."""
        self._say("ending")

    def ended(self, exit_code: int) -> None:
        """This process ends now, in order."""
        self._say(f"ended {exit_code}")

    def ready(self) -> None:
        """This standby is ready."""
        self._say("standby")

    def refused(self, why: str) -> None:
        """This standby can never take over."""
        self._say(f"refused {_one_line(why)}")

    def hopeless(self, why: str) -> None:
        """No process can take over."""
        self._say(f"hopeless {_one_line(why)}")

    def yield_now(self) -> None:
        """Ends this process at once; the standby takes over."""
        self._say("yield")

    # ------------------------------------------------------------------------ hearing

    def wait_prepared(self) -> Mapping[str, int]:
        """Blocks until the holder has said what this standby prepares for.

        Raises:
            HolderGoneError: it has ended.
        """
        words, descriptors = self._hear()
        if words[0] != "prepare" or len(words) != 2:
            raise SystemCallError(f"the holder said {' '.join(words)!r} instead of `prepare`")
        return _named(words[1], descriptors)

    def wait_turn(self) -> TakeOver:
        """Blocks until this standby's turn has come.

        Raises:
            HolderGoneError: it never will.
        """
        words, descriptors = self._hear()
        if words[0] != "take-over" or len(words) != 5:
            raise SystemCallError(f"the holder said {' '.join(words)!r} instead of `take-over`")
        return TakeOver(int(words[1]), int(words[2]), words[3], _named(words[4], descriptors))

    def _hear(self) -> tuple[list[str], list[int]]:
        assert self._socket is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _TEXT_BYTES_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise HolderGoneError(f"the holder cannot be heard: {error.strerror}") from error
        if not data:
            raise HolderGoneError("the holder has ended")
        return data.decode().split(), descriptors

    def listen(self, on_gone: Callable[[], None]) -> None:
        """On the event loop: hears what the holder says from now on.

        Args:
            on_gone: called once, when it has ended.
        """
        if self._socket is not None:
            self._on_gone = on_gone
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_TEXT_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
            return
        self._heard(data.decode())

    def _heard(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "standby":
            self.standby = "ready" if rest == "ready" else rest.removeprefix("none ")
            if self.standby == "ready":
                self.on_standby()
            else:
                log.warning("no standby: %s", self.standby, extra=events.about(events.NO_STANDBY))
        elif word == "unheld":
            self._unheld = rest
            log.warning("%s", self.degraded)
        elif self._renewal is not None and not self._renewal.done():
            if word == "renewed":
                self._renewal.set_result(None)
            elif word == "refused":
                self._renewal.set_exception(ConflictError(f"it cannot be restarted: {rest}"))

    def _gone(self) -> None:
        log.error(
            "the holder has ended: no process would take over from this one",
            extra=events.about(events.HOLDER_GONE),
        )
        self.close()
        if self._renewal is not None and not self._renewal.done():
            self._renewal.set_exception(ConflictError("the holder of this device has ended"))
        self._on_gone()

    async def renew(self, program: str = "") -> None:
        """Replaces the standby by a new one; returns when it is ready.

        Args:
            program: the interpreter to start it with, and standbys after it; "": as the last one.

        Raises:
            ConflictError: there is no holder, or the new process cannot take over. The old one
                stays then.
        """
        mend = "Stop the device and start it again instead."
        if self._socket is None:
            raise ConflictError("it has no holder, so nobody could take over", mend=mend)
        if self._renewal is not None:
            raise ConflictError("another restart of it is under way")
        self._renewal = asyncio.get_running_loop().create_future()
        try:
            self._say(f"renew {program}".rstrip())
            async with asyncio.timeout(RENEW_S_MAX):
                await self._renewal
        except TimeoutError:
            raise ConflictError("the new process was not ready in time") from None
        finally:
            self._renewal = None

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            with contextlib.suppress(RuntimeError):  # no loop: a standby
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]


def _named(names: str, descriptors: list[int]) -> dict[str, int]:
    listed = [] if names == "-" else names.split(",")
    if len(listed) != len(descriptors):
        for fd in descriptors:
            os.close(fd)
        raise SystemCallError(
            f"the holder handed over {len(descriptors)} descriptors for {len(listed)} names"
        )
    return dict(zip(listed, descriptors, strict=True))


def read_all(fd: int, bytes_max: int = 1 << 20) -> bytes:
    """The whole content of a small file, wherever its offset stands: that is shared."""
    data = b""
    while chunk := os.pread(fd, bytes_max - len(data), len(data)):
        data += chunk
    return data
