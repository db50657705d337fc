# SPDX-License-Identifier: Apache-2.0
"""isw_frontend as the front ends of `infiniswap.engine.protocol`. A NativeEngine makes them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from infiniswap.engine.binding import Handle, check, ffi, lib, text_of
from infiniswap.engine.native_ublk import ublk_error
from infiniswap.errors import NotFoundError

if TYPE_CHECKING:
    from infiniswap.engine.native_engine import NativeEngine


_RINGS_MAX = 64
"""As many as the holder takes."""


class NativeFrontend:
    """A running front end. Made by NativeEngine, which also closes it when it is closed first."""

    def __init__(self, engine: NativeEngine, name: str, pointer: Any) -> None:
        self._engine = engine  # keeps the engine alive longer than the front end
        self._handle = Handle(name, pointer, lib.isw_frontend_destroy)

    def handover(self) -> tuple[int, bytes]:
        """Any thread. Connection and first message; EngineError EOPNOTSUPP."""
        error = ffi.new("struct isw_error *")
        fd = ffi.new("int32_t *")
        init = ffi.new("char[]", lib.ISW_FUSE_INIT_BYTES_MAX)
        with self._handle.use() as frontend:
            result = lib.isw_frontend_fuse_handover(frontend, fd, init, error)
        count = check(result, "nobody could take the front end over", error)
        return int(fd[0]), bytes(ffi.buffer(init, count))

    def take_over(self, connection: int) -> None:
        """Blocking, worker thread; takes the descriptor. EngineError EPROTO, ENODEV."""
        error = ffi.new("struct isw_error *")
        with self._handle.use() as frontend:
            result = lib.isw_frontend_fuse_take_over(frontend, connection, error)
        check(result, "cannot take the fuse front end over", error)

    def close(self) -> None:
        """Blocking, worker thread, idempotent."""
        self._handle.close()
        self._engine._forget(self)


class NativeUblk(NativeFrontend):
    """A ublk block device, served or prepared to be taken over."""

    def __init__(self, engine: NativeEngine, pointer: Any, device_id: int) -> None:
        super().__init__(engine, "ublk front end", pointer)
        self._device_id = device_id

    @property
    def device_id(self) -> int:
        """N of /dev/ublkbN."""
        return self._device_id

    def rings(self) -> tuple[int, ...]:
        """Any thread, never waits."""
        fds = ffi.new("int32_t[]", _RINGS_MAX)
        with self._handle.use() as frontend:
            count = lib.isw_frontend_ublk_rings(frontend, fds, _RINGS_MAX)
        return tuple(int(fd) for fd in fds[0 : min(count, _RINGS_MAX)])

    def take_over(self, wait_ms_max: int) -> None:
        """Blocking, worker thread; at most `wait_ms_max` for the predecessor's end.

        Raises:
            ConflictError: it still lives; to be called again.
            NotFoundError: the device is gone, or somebody has stopped it.
            EngineError: anything else; the device stays as it is.
        """
        error = ffi.new("struct isw_error *")
        with self._handle.use() as frontend:
            result = lib.isw_frontend_ublk_take_over(frontend, wait_ms_max, error)
        if -result == errno.ENODEV:
            raise NotFoundError(text_of(error, -result))
        if result < 0:
            raise ublk_error(-result, error, f"/dev/ublkb{self._device_id}")


class NativeNbdFrontend(NativeFrontend):
    """The front end nbd."""

    @property
    def size_bytes(self) -> int:
        """Of the device."""
        return self._engine.config.size_bytes

    @property
    def requests_max(self) -> int:
        """In flight, on all sockets together."""
        return self._engine.config.requests_max

    def serve(self, descriptor: int) -> None:
        """Any thread; makes a copy of the descriptor."""
        error = ffi.new("struct isw_error *")
        with self._handle.use() as frontend:
            result = lib.isw_frontend_nbd_serve(frontend, descriptor, error)
        check(result, "cannot serve the kernel's connection", error)

    def connections(self) -> int:
        """Any thread, never waits."""
        with self._handle.use() as frontend:
            return int(lib.isw_frontend_nbd_connections(frontend))
