# SPDX-License-Identifier: Apache-2.0
"""What a device does for its successor, and what a successor finds.

The state file is made here: `RUN_DIR/NAME/state` where that is in memory (tmpfs), else a file
without a name, which lasts as long as somebody of holder, device process and standby lives.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from infiniswap import events, logs
from infiniswap.device.api import SuccessionRow
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec, decode_spec, encode_spec, with_own_values
from infiniswap.device.succession.holder import (
    LOCK,
    SPEC,
    STATE,
    UNSAID,
    Holder,
    TakeOver,
    read_all,
)
from infiniswap.engine.protocol import Engine
from infiniswap.errors import (
    ConfigError,
    EngineError,
    InfiniswapError,
    NotFoundError,
    UnavailableError,
    from_oserror,
)
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.system.mounts import mount_of
from infiniswap.system.process import swap_safety_report

log = logging.getLogger(__name__)

_HOPELESS = frozenset({errno.ENODATA, errno.EBADMSG, errno.EPROTONOSUPPORT, errno.ESTALE})
_WARM_UP_S_MAX = 30.0

IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class _Kept(msgspec.Struct, frozen=True):
    """Content of the descriptor `spec`."""

    spec: msgspec.Raw
    note: bytes


class HopelessError(InfiniswapError):
    """Nobody can take this device over: it is lost, as if there had been no standby."""


class Succession:
    """One process's part in it.

    Args:
        holder: the parent; one that is not present for a device without a standby.
    """

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self._turn: TakeOver | None = None
        self._pause_ms = 0.0
        self._unavailable = ""
        self.note: bytes | None = None
        """Of the front end, for a successor; None: nobody could succeed."""

    # ----------------------------------------------------- for whoever comes after us

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
        """The engine has given it its size: the holder locks it, and hands it on."""
        if fd >= 0:
            # An open file of its own: the engine's has a lock that must end with this process.
            copy = reopen(fd)
            self.holder.keep(STATE, copy)
            os.close(copy)

    def keep_device(self, spec: DeviceSpec, attachment: Attachment) -> None:
        """What was attached, and with which front end: a successor must not choose another one."""
        if not self.holder.present:
            return
        try:
            handover = attachment.kernel.handover()
        except UnavailableError as error:
            # The holder starts no standby that could only fail.
            self._unavailable = f"standby: nobody can take over from this process: {error}"
            self.holder.close()
            return
        self.holder.hold_rings(attachment.kernel.rings())
        for name, fd in handover.descriptors.items():
            self.holder.keep(name, fd)
        self.note = handover.note
        self.keep_spec(spec, attachment)

    def keep_spec(self, spec: DeviceSpec, attachment: Attachment) -> None:
        """The device as it is now."""
        if self.note is None:
            return
        kept = msgspec.structs.replace(spec, owner_pid=None, discard_contents=False)
        kept = with_own_values(kept, frontend=attachment.choice.frontend)
        data = msgspec.json.encode(_Kept(msgspec.Raw(encode_spec(kept)), self.note))
        self.holder.keep_bytes(SPEC, data)

    def keep_lock(self, fd: int) -> None:
        """The same open file: the device runs as long as one of us has it."""
        self.holder.keep(LOCK, fd)

    # ------------------------------------------------------------------- as successor

    def begin(self, turn: TakeOver, spec: DeviceSpec) -> tuple[DeviceSpec, dict[str, int]]:
        """It is this process's turn, with that spec.

        No log line is written before it serves: that could wait for a page of this device.

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
        for name in (SPEC, STATE):
            os.close(descriptors.pop(name))
        return spec, descriptors

    def done(self) -> None:
        """It serves."""
        assert self._turn is not None
        self._pause_ms = (time.monotonic_ns() - self._turn.died_ns) / 1e6
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
        """What an administrator should know: of holder, standby, and the memory of the state."""
        if self._unavailable:
            return [self._unavailable]
        found = [self.holder.degraded] if self.holder.degraded else []
        if self.holder.present and self.holder.pid is not None:
            try:
                report = swap_safety_report(self.holder.pid)
            except InfiniswapError:
                return found
            found += [f"holder's {item}" for item in report.degraded if item.name == "memory-lock"]
        return found


def read_kept(data: bytes) -> tuple[DeviceSpec, bytes]:
    """Spec and note from the descriptor `spec`.

    Raises:
        ConfigError: written by a release that this one does not understand.
    """
    where = "what the predecessor left"
    try:
        kept = decode_json(data, _Kept)
    except NotJsonError as error:
        raise ConfigError(f"it cannot be read ({error})", where=where) from error
    return decode_spec(bytes(kept.spec), where), kept.note


def newest(fd: int, spec: DeviceSpec) -> DeviceSpec:
    """The spec that the predecessor kept last; the one that is known where it cannot be read."""
    try:
        return read_kept(read_all(fd))[0]
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


def check_state(fd: int, spec: DeviceSpec) -> None:
    """Whether this code could go on with a state file; nothing is touched.

    Raises:
        EngineError: damaged, of another version or boot, or of another device.
    """
    from infiniswap.engine.native_engine import read_state

    info = read_state(fd)
    if (info.size_bytes, info.slab_bytes) != (spec.size_bytes, spec.config.device.slab_bytes):
        raise EngineError("the state file is of a device of another size", code=errno.EBADMSG)


def take_state(engine: Engine, backup: str | None) -> None:
    """Makes the predecessor's state the engine's own. Blocking.

    Raises:
        HopelessError: it cannot be used.
        ConflictError: the predecessor's last writes have not ended yet.
    """
    try:
        engine.take_over(backup)
    except EngineError as error:
        if error.code in _HOPELESS:
            raise HopelessError(
                f"the state of the device cannot be used: {error.what}", mend=error.mend
            ) from error
        raise


def prepare(
    attachment: Attachment, engine: Engine, note: bytes, *, look_again_s: float = 1.0
) -> Attachment:
    """Its front end is made ready to take over. Blocking; without an event loop.

    Args:
        attachment: of a standby.
        engine: a standby, too.
        note: the predecessor's.
        look_again_s: after that, where nothing was found.

    Raises:
        HopelessError: nothing is left of the predecessor's.
        InfiniswapError: this process could never take over.
    """
    try:
        attachment.kernel.prepare(engine, note)
    except NotFoundError:
        # It ends the device if nobody serves: what could not be read for a moment is not gone.
        time.sleep(look_again_s)
        try:
            attachment.kernel.prepare(engine, note)
        except NotFoundError as error:
            raise HopelessError(str(error)) from error
    return attachment


def adopt(attachment: Attachment, descriptors: Mapping[str, int]) -> None:
    """Front end, link and swap as they are. Blocking.

    Raises:
        HopelessError: nothing is left of them.
        InfiniswapError: the step that failed.
    """
    try:
        attachment.adopt_device(descriptors)
    except NotFoundError as error:
        raise HopelessError(str(error)) from error


def warm_up(executor: ThreadPoolExecutor, threads: int) -> None:
    """Makes an executor start all its threads now."""
    barrier = threading.Barrier(threads + 1)
    for _ in range(threads):
        executor.submit(barrier.wait, _WARM_UP_S_MAX)
    barrier.wait(_WARM_UP_S_MAX)
