# SPDX-License-Identifier: Apache-2.0
"""isw_ublk_*: ublk devices, whoever serves them; threads: see `infiniswap.engine.native`."""

from __future__ import annotations

import errno
from typing import Any, Self

from infiniswap.engine.binding import Handle, ffi, lib, struct_ints, text_of
from infiniswap.engine.native_frontend import frontend_error
from infiniswap.engine.protocol import UblkShape
from infiniswap.errors import (
    EngineError,
    InfiniswapError,
    NotFoundError,
    UnavailableError,
)

_DRIVER_MEND = "modprobe ublk_drv; where that cannot be had, use --frontend nbd or fuse."
_HOST_MEND = "Use --frontend nbd or fuse where that cannot be had; see `infiniswap doctor`."


def _error(result: int, error: Any, device_id: int | None = None) -> InfiniswapError:
    where = "" if device_id is None else f"/dev/ublkb{device_id}"
    return frontend_error(-result, text_of(error, -result), where)


def ublk_check() -> None:
    """Whether this build and this host can have ublk devices. Blocking for milliseconds.

    Raises:
        UnavailableError: what is missing, and how to mend it.
        NotPermittedError: only root can.
    """
    error = ffi.new("struct isw_error *")
    result = lib.isw_ublk_check(error)
    if result >= 0:
        return
    failure = _error(result, error)
    if isinstance(failure, EngineError):
        mend = _DRIVER_MEND if -result == errno.ENODEV else _HOST_MEND
        raise UnavailableError(failure.what, mend=mend)
    raise failure


def ublk_shape(device_id: int) -> UblkShape | None:
    """What the kernel knows of a ublk device; None when there is none of that number.

    Raises:
        UnavailableError, NotPermittedError: no ublk here.
        EngineError: the kernel did not say.
    """
    error = ffi.new("struct isw_error *")
    info = ffi.new("struct isw_ublk_info *")
    result = lib.isw_ublk_info(device_id, info, error)
    if result >= 0:
        known = struct_ints(info[0])
        state = known.pop("state")
        return UblkShape(live=state == lib.ISW_UBLK_LIVE, ended=state == lib.ISW_UBLK_DEAD, **known)
    if -result in (errno.ENODEV, errno.EOPNOTSUPP):
        ublk_check()  # which raises when it is the driver that is not there, or too old
        return None
    raise _error(result, error)


class FailingUblk:
    """A device whose contents are lost, served with an error for everything: then `swapoff` ends.

    A context manager; at its end the device is removed.

    Raises:
        ConflictError: its process lives.
        InfiniswapError: as for `ublk_remove`.
    """

    def __init__(self, device_id: int, identity: int, wait_ms_max: int) -> None:
        error = ffi.new("struct isw_error *")
        out = ffi.new("isw_frontend **")
        result = lib.isw_ublk_fail(device_id, identity, wait_ms_max, out, error)
        if -result == errno.ENODEV:
            raise NotFoundError(text_of(error, -result))
        if result < 0:
            raise _error(result, error, device_id)
        self._handle = Handle("failing ublk device", out[0], lib.isw_frontend_destroy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._handle.close()


def ublk_remove(device_id: int, identity: int) -> None:
    """Removes a device whose process is dead. Blocking. What waits for it is failed.

    Raises:
        NotFoundError: there is no such device.
        ConflictError: a process serves it.
        NotPermittedError: removing needs root.
        EngineError: it has another identity (ESTALE), or the kernel's refusal.
    """
    error = ffi.new("struct isw_error *")
    result = lib.isw_ublk_remove(device_id, identity, error)
    if -result == errno.ENODEV:
        raise NotFoundError(text_of(error, -result))
    if result < 0:
        raise _error(result, error, device_id)
