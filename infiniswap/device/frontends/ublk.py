# SPDX-License-Identifier: Apache-2.0
"""ublk: the kernel's user space block devices.

A device outlives its process: when that dies, requests wait in the kernel, and a successor that has
prepared itself takes the device over (`prepare`, `take_over`). We know a device by an identity that
the kernel keeps with it, never by its number, which the kernel uses again once it is free.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from infiniswap.device.frontends import in_use
from infiniswap.device.frontends.base import (
    Condition,
    FrontEnd,
    KernelDevice,
    Leftover,
    Places,
)
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.native_ublk import FailingUblk, ublk_check, ublk_remove, ublk_shape
from infiniswap.engine.protocol import Engine, Frontend, FrontendConfig
from infiniswap.errors import (
    ConflictError,
    InfiniswapError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)
from infiniswap.system import swap, ublk
from infiniswap.system.files import try_read_int

log = logging.getLogger(__name__)

_OURS: Final = 0x6973_7770 << 32
"""The upper half of every identity of ours: "iswp"."""

_NOTICED_S_MAX: Final = 10.0
_NOTICED_PAUSE_S: Final = 0.02
_TAKE_OVER_MS_MAX: Final = 240_000
"""Less than the holder gives a successor. A process that gives up ends, and the next one may need
memory that nobody can free without the device."""
_GIVE_UP_MS_MAX: Final = 30_000
_SWAPOFF_S_MAX: Final = 60.0


def check() -> None:
    """Whether this host has what it takes; loads the kernel's module where it is not loaded.

    Raises:
        UnavailableError: what is missing, and how to mend it.
        NotPermittedError: it needs root.
    """
    ublk.load_driver()
    ublk_check()


def identity_of(paths: DevicePaths) -> int:
    """What the kernel knows a device by: 64 bits, the upper half says that it is one of ours."""
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(paths.run)), digest_size=4).digest()
    return _OURS | int.from_bytes(digest, "big")


def is_ours(identity: int) -> bool:
    """Whether that is the identity of a device of infiniswap's."""
    return identity & ~0xFFFF_FFFF == _OURS


def find_left(paths: DevicePaths) -> tuple[int, ...]:
    """Numbers of the kernel's devices with this one's identity."""
    identity = identity_of(paths)
    return tuple(number for number in ublk.numbers() if _identity(number) == identity)


def _identity(number: int) -> int | None:
    try:
        shape = ublk_shape(number)
    except (UnavailableError, NotPermittedError):
        return None
    return None if shape is None else shape.identity


class UblkKernel(KernelDevice):
    """A KernelDevice. Its number stays taken as long as this process has it open, even if somebody
    removes it (FRONTEND_DOWN)."""

    def __init__(self, paths: DevicePaths) -> None:
        self._paths = paths
        self._frontend: Frontend | None = None
        self._device_id = -1
        self._serving = False

    @property
    def block_device(self) -> Path | None:
        """The ublk device."""
        return ublk.block_path(self._device_id) if self._serving else None

    @property
    def path(self) -> str:
        """The ublk device, also before it exists."""
        device = self.block_device
        return "/dev/ublkb" if device is None else str(device)

    def attach(self, engine: Engine) -> None:
        """Makes the device."""
        self._frontend = engine.frontend("ublk", FrontendConfig(identity=identity_of(self._paths)))
        self._device_id = self._frontend.info().device_id
        self._serving = True
        self._tune()

    def prepare(self, engine: Engine, note: bytes = b"") -> None:
        """For a standby, while the predecessor serves: all that needs memory.

        Raises:
            NotFoundError: the predecessor has no device.
            InfiniswapError: it is not one for this engine.
        """
        del note
        left = find_left(self._paths)
        if not left:
            raise NotFoundError(
                "there is no ublk device of an earlier process", where=f"device {self._paths.name}"
            )
        self._frontend = engine.frontend_prepare(
            "ublk", FrontendConfig(device_id=left[0], identity=identity_of(self._paths))
        )
        self._device_id = left[0]

    def take_over(self, descriptors: Mapping[str, int]) -> None:
        """Once the predecessor is dead: serves the requests that wait.

        Raises:
            ConflictError: it is not dead; the device stays its.
            NotFoundError: the device is gone, or somebody has stopped it.
            EngineError: the kernel's refusal; the device stays as it is.
        """
        del descriptors
        assert self._frontend is not None
        self._frontend.take_over(_TAKE_OVER_MS_MAX)
        self._serving = True

    def rings(self) -> tuple[int, ...]:
        """One for each queue."""
        return () if self._frontend is None else self._frontend.rings()

    def _tune(self) -> None:
        shape = ublk_shape(self._device_id)
        assert shape is not None
        refused = ublk.tune(self._device_id, shape.queue_depth)
        if refused:
            log.info("ublk device: the kernel refused to set %s", ", ".join(refused))

    def is_left(self) -> bool:
        """Unless somebody has removed or stopped it."""
        shape = None if self._frontend is None else ublk_shape(self._device_id)
        return shape is not None and not shape.ended

    def detach(self) -> None:
        """Ends the device. (The kernel would not refuse, even if the device is in use.)

        Raises:
            ConflictError: it is in use; everything stays.
        """
        device = self.block_device
        if device is not None:
            with in_use.held(device, self._paths.name):
                pass
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None
            self._serving = False


def clear(paths: DevicePaths) -> None:
    """As FrontEnd says."""
    for number in find_left(paths):
        in_use.check_left_unused(
            ublk.block_path(number),
            paths.name,
            "End the programs whose memory is there, and restart the host: without its process "
            "`swapoff` of it waits for ever.",
        )
        log.warning("%s: ublk device of an earlier process removed", ublk.block_path(number))
        _remove(number, identity_of(paths))


def _remove(number: int, identity: int) -> None:
    """The kernel takes a moment to notice that a process has died."""
    end_s = time.monotonic() + _NOTICED_S_MAX
    while True:
        try:
            ublk_remove(number, identity)
        except NotFoundError:
            return
        except ConflictError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(_NOTICED_PAUSE_S)
        else:
            return


def give_up(paths: DevicePaths) -> tuple[Path, ...]:
    """As FrontEnd says. Swap space there is taken out of use meanwhile, as nothing could once the
    device is gone, so none is returned.

    Raises:
        InfiniswapError: swapoff was refused; the device is removed nevertheless.
    """
    for number in find_left(paths):
        # A device that somebody has stopped has failed all its requests already.
        with contextlib.suppress(NotFoundError), _failing(number, paths):
            device = ublk.block_path(number)
            if swap.find_area(device) is not None:
                swap.swapoff(device, timeout_s=_SWAPOFF_S_MAX)
    return ()


def _failing(number: int, paths: DevicePaths) -> FailingUblk:
    return FailingUblk(number, identity_of(paths), _GIVE_UP_MS_MAX)


def examine(places: Places, check: Callable[[], None] = ublk_check) -> Iterator[Condition]:
    """As FrontEnd says. Where ublk is missing, nbd or fuse takes its place."""
    state = try_read_int(places.proc / "sys/kernel/io_uring_disabled") or 0
    if state != 0:
        yield Condition(
            "ublk",
            f"io_uring is not for everybody here (kernel.io_uring_disabled = {state}), and ublk "
            "devices need it: devices get the front end nbd or fuse",
            "sysctl -w kernel.io_uring_disabled=0",
        )
        return
    try:
        check()
    except InfiniswapError as error:
        yield Condition(
            "ublk",
            f"no ublk devices: {error.what}; devices get the front end nbd or fuse",
            error.mend,
        )
        return
    used, limit = len(ublk.numbers(sys=places.sys)), ublk.limit(sys=places.sys)
    text = f"there are ublk devices ({used} now)"
    if limit is not None and used >= limit:
        yield Condition(
            "ublk",
            f"{text}, which is all that the driver may allow",
            f"echo {used + 16} > /sys/{ublk.LIMIT}",
        )
    else:
        yield Condition("ublk", text)


def leftovers(run_dir: Path, died: Collection[str], places: Places) -> Iterator[Leftover]:
    """As FrontEnd says."""
    known = {identity_of(DevicePaths(name, run_dir / name, run_dir)) for name in died}
    for number in ublk.numbers(sys=places.sys):
        try:
            shape = ublk_shape(number)
        except (UnavailableError, NotPermittedError):
            return
        if shape is None or shape.live or not is_ours(shape.identity) or shape.identity in known:
            continue
        yield Leftover(
            f"{ublk.block_path(number)}: a ublk device of infiniswap that no process serves (the "
            f"last was {shape.server_pid})",
            "start the device again with the run directory that it had (device.run_dir), or "
            "restart the host",
        )


FRONT_END: Final = FrontEnd(
    name="ublk",
    check=check,
    would_load=ublk.could_load_driver,
    make=UblkKernel,
    clear=clear,
    give_up=give_up,
    examine=examine,
    leftovers=leftovers,
    packages="liburing-dev linux-libc-dev",
)
