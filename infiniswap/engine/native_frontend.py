# SPDX-License-Identifier: Apache-2.0
"""isw_frontend as the front ends of `infiniswap.engine.protocol`. A NativeEngine makes them."""

from __future__ import annotations

import dataclasses
import errno
import os
from typing import TYPE_CHECKING, Any

from infiniswap import rights
from infiniswap.engine.binding import Handle, check, ffi, lib, struct_ints, text_of
from infiniswap.engine.protocol import FarTold, FrontendConfig, FrontendInfo
from infiniswap.errors import (
    ConflictError,
    EngineError,
    InfiniswapError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from infiniswap.engine.native_engine import NativeEngine


_RINGS_MAX = 64
"""As many as the holder takes."""

_BUILD_MEND = "Or use another front end: --frontend auto takes one that this build has."


def frontend_error(code: int, text: str, where: str = "") -> InfiniswapError:
    """The error class for what a function of a front end has returned."""
    if code == errno.ENOSYS:
        return UnavailableError(text, where=where, mend=_BUILD_MEND)
    if code in (errno.EPERM, errno.EACCES):
        return NotPermittedError(text, where=where, mend=rights.mend("CAP_SYS_ADMIN"))
    if code == errno.EBUSY:
        return ConflictError(text, where=where, mend="Stop that process first.")
    return EngineError(text, where=where, code=code)


def frontend_config(config: FrontendConfig) -> tuple[Any, Any]:
    """struct isw_frontend_config; it is good as long as the first value lives."""
    values: dict[str, Any] = dataclasses.asdict(config)
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, str):
            values[name] = ffi.new("char[]", os.fsencode(value))
        elif isinstance(value, bytes):
            values |= {name: ffi.from_buffer(value), f"{name}_bytes": len(value)}
    return values, ffi.new("struct isw_frontend_config *", values)


class NativeFrontend:
    """A Frontend. Made by NativeEngine, which also closes it when it is closed first."""

    def __init__(self, engine: NativeEngine, kind: str, pointer: Any) -> None:
        self._engine = engine  # keeps the engine alive longer than the front end
        self._kind = kind
        self._handle = Handle(f"front end {kind}", pointer, lib.isw_frontend_destroy)

    def info(self) -> FrontendInfo:
        """Any thread, never waits."""
        info = ffi.new("struct isw_frontend_info *")
        with self._handle.use() as frontend:
            lib.isw_frontend_info(frontend, info)
        far = FarTold(**struct_ints(info[0].far))
        return FrontendInfo(**struct_ints(info[0]), far=far)

    def handover(self) -> tuple[int, bytes]:
        """Any thread. EngineError EOPNOTSUPP."""
        error = ffi.new("struct isw_error *")
        fd = ffi.new("int32_t *")
        note = ffi.new("char[]", lib.ISW_FRONTEND_NOTE_BYTES_MAX)
        with self._handle.use() as frontend:
            result = lib.isw_frontend_handover(frontend, fd, note, error)
        count = check(result, "nobody could take the front end over", error)
        return int(fd[0]), bytes(ffi.buffer(note, count))

    def serve(self, descriptor: int) -> None:
        """Kinds nbd, far: any thread. Kind fuse: blocking, worker thread; EngineError EPROTO,
        ENODEV."""
        error = ffi.new("struct isw_error *")
        with self._handle.use() as frontend:
            result = lib.isw_frontend_serve(frontend, descriptor, error)
        check(result, f"the front end {self._kind} cannot serve the kernel's connection", error)

    def take_over(self, wait_ms_max: int) -> None:
        """Blocking, worker thread; at most `wait_ms_max` for the predecessor's end.

        Raises:
            ConflictError: it still lives; to be called again.
            NotFoundError: the device is gone, or somebody has stopped it.
            EngineError: anything else; the device stays as it is.
        """
        error = ffi.new("struct isw_error *")
        with self._handle.use() as frontend:
            result = lib.isw_frontend_take_over(frontend, wait_ms_max, error)
        if -result == errno.ENODEV:
            raise NotFoundError(text_of(error, -result))
        if result < 0:
            raise frontend_error(-result, text_of(error, -result))

    def rings(self) -> tuple[int, ...]:
        """Any thread, never waits."""
        fds = ffi.new("int32_t[]", _RINGS_MAX)
        with self._handle.use() as frontend:
            count = lib.isw_frontend_rings(frontend, fds, _RINGS_MAX)
        return tuple(int(fd) for fd in fds[0 : min(count, _RINGS_MAX)])

    def close(self) -> None:
        """Blocking, worker thread, idempotent."""
        self._handle.close()
        self._engine._forget(self)
