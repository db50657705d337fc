# SPDX-License-Identifier: Apache-2.0
"""What a device process keeps for its successor.

The state file is made here: `RUN_DIR/NAME/state` where that is in memory (tmpfs), else a file
without a name, which lasts until holder, device process and standby have all ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import NamedTuple

import msgspec

from infiniswap import events, logs
from infiniswap.control.messages import VERSIONS
from infiniswap.device.api import SuccessionRow
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec, decode_spec, encode_spec, with_own_values
from infiniswap.device.succession.holder import (
    KEY,
    KILLED,
    LOCK,
    SPEC,
    STATE,
    UNSAID,
    Holder,
    TakeOver,
    read_all,
)
from infiniswap.errors import (
    ConfigError,
    InfiniswapError,
    UnavailableError,
    from_oserror,
)
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.system.mounts import mount_of
from infiniswap.system.process import Degraded, swap_safety_report
from infiniswap.system.surroundings.in_force import NAME as STARTER
from infiniswap.system.surroundings.kills import KillWatch

log = logging.getLogger(__name__)

IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class _Kept(msgspec.Struct, frozen=True):
    """Content of the descriptor `spec`. `protocol`: the version in which the process talks to its
    donors; releases of version 1 do not say it. `shown`: see Left; earlier releases of version 2 do
    not say it."""

    spec: msgspec.Raw
    note: bytes
    protocol: int = 1
    shown: bytes = b""


class Left(NamedTuple):
    """What a predecessor has left in the descriptor `spec`.

    Attributes:
        spec: of the device.
        note: of its front end.
        shown: what it showed donors (Shown.kept); empty: it has not said.
    """

    spec: DeviceSpec
    note: bytes
    shown: bytes


class Succession:
    """One process's part in a hand-over: what it keeps for the next one, and its own take-over.

    Args:
        holder: the parent; one that is not present for a device without a standby.
    """

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self._turn: TakeOver | None = None
        self._pause_ms = 0.0
        self._kills = KillWatch(os.getpid())
        self._cause = ""
        self._unavailable = ""
        self.note: bytes | None = None
        """The front end's note for a successor; None: no process could succeed."""

    # ----------------------------------------------------------- for the successor

    def make_state(self, paths: DevicePaths) -> int:
        """A new state file for the engine; -1 for a device without a standby. The caller closes it.

        Raises:
            NotPermittedError, SystemCallError: it cannot be made.
        """
        if not self.holder.present:
            return -1
        try:
            paths.state.unlink(missing_ok=True)
            if mount_of(paths.run).fs_type not in IN_MEMORY:
                return os.memfd_create("infiniswap-state", os.MFD_CLOEXEC)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return os.open(paths.state, flags, 0o600)
        except OSError as error:
            raise from_oserror(
                "cannot make the device's state file", error, where=str(paths.state)
            ) from error

    def keep_state(self, fd: int) -> None:
        """Gives the state file, which the engine has sized, to the holder: it locks the file and
        hands it on."""
        if fd >= 0:
            # An open file of its own: the engine's has a lock that must end with this process.
            copy = reopen(fd)
            self.holder.keep(STATE, copy)
            os.close(copy)

    def keep_key(self, fd: int) -> None:
        """Gives the key that seals the pages to the holder. It is memory that is never swapped out;
        what is kept is a descriptor of it. -1: there is none."""
        if fd >= 0:
            self.holder.keep(KEY, fd)

    def keep_device(self, spec: DeviceSpec, attachment: Attachment, shown: bytes) -> None:
        """Keeps what is attached, and with which front end: a successor must not choose another.
        `shown`: see Left."""
        if not self.holder.present:
            return
        try:
            handover = attachment.kernel.handover()
        except UnavailableError as error:
            # The holder starts no standby that could only fail.
            self._unavailable = f"standby: no other process could take over from this one: {error}"
            self.holder.close()
            return
        self.holder.hold_rings(attachment.kernel.rings())
        for name, fd in handover.descriptors.items():
            self.holder.keep(name, fd)
        self.note = handover.note
        self.keep_spec(spec, attachment, shown)

    def keep_spec(self, spec: DeviceSpec, attachment: Attachment, shown: bytes) -> None:
        """Keeps the device's spec, and what it shows, as they are now."""
        if self.note is None:
            return
        kept = msgspec.structs.replace(spec, owner_pid=None, discard_contents=False)
        kept = with_own_values(kept, frontend=attachment.choice.frontend)
        record = msgspec.Raw(encode_spec(kept))
        data = msgspec.json.encode(_Kept(record, self.note, max(VERSIONS), shown))
        self.holder.keep_bytes(SPEC, data)

    def keep_lock(self, fd: int) -> None:
        """Keeps the same open file: the device runs as long as one process has it."""
        self.holder.keep(LOCK, fd)

    # ------------------------------------------------------------------- as successor

    def begin(self, turn: TakeOver, spec: DeviceSpec) -> tuple[DeviceSpec, dict[str, int]]:
        """Begins the take-over.

        Writes no log line before it serves: that could wait for a page of this device.

        Returns:
            The spec that the predecessor kept last, and the descriptors of lock and front end.
        """
        logs.hold()
        self._turn = turn
        descriptors = dict(turn.descriptors)
        if (unsaid := descriptors.pop(UNSAID, -1)) >= 0:
            with contextlib.suppress(OSError):
                logs.hold(before=read_all(unsaid))
            os.close(unsaid)
        log.warning(
            "take-over %d: the predecessor has ended (%s)",
            turn.count,
            turn.reason,
            extra=events.about(events.TAKE_OVER),
        )
        spec = newest(descriptors[SPEC], spec)
        for name in {SPEC, STATE, KEY} & descriptors.keys():  # known since `prepare`
            os.close(descriptors.pop(name))
        return spec, descriptors

    def done(self) -> None:
        """Ends the take-over: this process serves."""
        assert self._turn is not None
        self._pause_ms = (time.monotonic_ns() - self._turn.died_ns) / 1e6
        if self._turn.reason == KILLED and (cause := self._kills.cause()):
            self._cause = f"the predecessor was killed by the kernel for {cause}"
            log.error("%s", self._cause, extra=events.about(events.TAKE_OVER))
        log.warning(
            "take-over %d: done, after %.0f ms",
            self._turn.count,
            self._pause_ms,
            extra=events.about(events.TAKE_OVER),
        )
        logs.release()
        self.holder.drop(UNSAID)

    @property
    def is_successor(self) -> bool:
        """Whether it has taken over from another process."""
        return self._turn is not None

    def row(self) -> SuccessionRow | None:
        """For the status."""
        holder, turn = self.holder, self._turn
        if self._unavailable or not (holder.present or holder.degraded):
            return None
        return SuccessionRow(
            holder_pid=holder.pid if holder.present else None,
            standby=(holder.standby or "starting") if holder.present else "none",
            take_overs=0 if turn is None else turn.count,
            reason="" if turn is None else turn.reason,
            pause_ms=round(self._pause_ms, 1),
        )

    def degraded(self) -> list[str]:
        """What an administrator should know of the holder, the standby, and the state's memory."""
        if self._unavailable:
            return [self._unavailable]
        found = [self.holder.degraded] if self.holder.degraded else []
        if self._cause:
            mend = "Raise that limit: without room the kernel kills each successor, too."
            found.append(str(Degraded(STARTER, self._cause, mend)))
        if self.holder.present and self.holder.pid is not None:
            try:
                report = swap_safety_report(self.holder.pid)
            except InfiniswapError:
                return found
            found += [f"holder's {item}" for item in report.degraded if item.name == "memory-lock"]
        return found


def read_kept(data: bytes) -> Left:
    """The content of the descriptor `spec`.

    Raises:
        ConfigError: written by a release that this one does not understand.
    """
    where = "what the predecessor left"
    try:
        kept = decode_json(data, _Kept)
    except NotJsonError as error:
        raise ConfigError(f"it cannot be read ({error})", where=where) from error
    if kept.protocol not in VERSIONS:
        # The leases are with donors that would not talk to this process: what only they have would
        # be lost.
        raise ConfigError(
            f"its process talks to donors in protocol version {kept.protocol}, which this release "
            "does not speak",
            where=where,
            mend="Stop the device (`infiniswap device stop NAME`), upgrade its donors, then start "
            "it again. Until then the old process goes on.",
        )
    return Left(decode_spec(bytes(kept.spec), where), kept.note, kept.shown)


def newest(fd: int, spec: DeviceSpec) -> DeviceSpec:
    """The spec that the predecessor kept last; the one that is known where it cannot be read."""
    try:
        return read_kept(read_all(fd)).spec
    except InfiniswapError as error:
        log.error("%s", error)
        return spec


def reopen(fd: int) -> int:
    """The same file as an open file of its own, as locks belong to those.

    Raises:
        SystemCallError: the kernel's refusal.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise from_oserror("cannot open the state file again", error) from error
