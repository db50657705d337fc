# SPDX-License-Identifier: Apache-2.0
"""The kernel's nbd devices, told by generic netlink (<linux/nbd-netlink.h>) and seen in /sys.

The kernel is given sockets on which the other end speaks the NBD protocol already: it does no
handshake. Every device of ours carries an identifier, which the kernel keeps, shows, and compares
before it lets anybody reconfigure the device: a stranger's device is never taken for ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.errors import (
    DeadlineError,
    NotFoundError,
    NotPermittedError,
    SystemCallError,
    UnavailableError,
    from_oserror,
)
from infiniswap.system import block, genl
from infiniswap.system.files import PROC, SYS, try_read_text
from infiniswap.system.genl import Family, Link
from infiniswap.units import PAGE_BYTES

REQUEST_BYTES_MAX: Final = 128 * 1024
"""The largest request the kernel is to send: its own default, and no page is cut."""

REQUEST_TIMEOUT_S: Final = 5
"""How long the kernel waits for an answer before it gives the connection up and sends the request
again. It alone decides how long what was in flight stands still when the device process has died,
so it is short; and yet longer than all that a living process does: 2 s until a donor is given up,
then a read from the backup."""

REQUEST_TIMEOUT_S_MAX: Final = 80
"""The timeout doubles up to this while a living process is too slow (a disk that hangs)."""

DEAD_CONNECTION_S: Final = 600
"""How long requests wait for a successor when no connection is left. After that they fail, which
ends the programs whose memory is there: better than processes that nobody can end, and long enough
for a successor that has to be swapped in itself. Detaching ends the wait at once."""

FREE_S_MAX: Final = 10.0

QUEUE_SETTINGS: Final = (
    *block.AS_MEMORY,
    ("max_sectors_kb", str(REQUEST_BYTES_MAX // 1024)),
)
"""What `tune` writes to /sys/block/nbdN/queue, with why."""

_CONNECT, _DISCONNECT, _RECONFIGURE = 1, 2, 3
_INDEX, _SIZE, _BLOCK_SIZE, _TIMEOUT, _SERVER_FLAGS, _CLIENT_FLAGS, _SOCKETS = range(1, 8)
_DEAD_CONNECTION, _IDENTIFIER = 8, 10
_SOCKET_ITEM, _SOCKET_FD = 1, 1

_HAS_FLAGS, _FLUSH, _FUA, _TRIM = 1 << 0, 1 << 2, 1 << 3, 1 << 5
_WRITE_ZEROES, _MULTI_CONN = 1 << 6, 1 << 8
# WRITE_ZEROES is taken up by Linux 6.12 and later; earlier kernels do not look at it.
_FLAGS: Final = _HAS_FLAGS | _FLUSH | _FUA | _TRIM | _WRITE_ZEROES | _MULTI_CONN
# Neither destroyed on disconnect (others may use the number) nor disconnected on close (mkswap).
_NO_CLIENT_FLAGS: Final = 0

_MEND_FUSE: Final = "Use --frontend fuse (or auto)."


@dataclass(frozen=True, slots=True)
class NbdDevice:
    """An nbd device that is connected, or has somebody who has it open.

    Attributes:
        index: N of /dev/nbdN.
        identifier: as given to `connect`; empty for somebody else's.
        size_bytes: 0 when it is not connected.
    """

    index: int
    identifier: str
    size_bytes: int

    @property
    def path(self) -> Path:
        """The device node."""
        return Path(f"/dev/nbd{self.index}")


def device(index: int, *, sys: Path = SYS) -> NbdDevice | None:
    """Device `index`; None when it is free, or there is none."""
    directory = sys / "block" / f"nbd{index}"
    sectors = (try_read_text(directory / "size") or "").strip()
    size_bytes = int(sectors) * 512 if sectors.isdecimal() else 0
    if size_bytes == 0 and try_read_text(directory / "pid") is None:
        return None
    identifier = (try_read_text(directory / "backend") or "").removesuffix("\n")
    return NbdDevice(index, identifier, size_bytes)


def devices(*, sys: Path = SYS) -> tuple[NbdDevice, ...]:
    """Every one that is not free, by index."""
    found = (device(index, sys=sys) for index in block.numbers(sys / "block", "nbd"))
    return tuple(device for device in found if device is not None)


def find_family(link: Link, *, sys: Path = SYS, proc: Path = PROC) -> Family:
    """The kernel's nbd, when it can do what is needed.

    Raises:
        UnavailableError: what is missing, and how to mend it.
    """
    if not (sys / "module" / "nbd").exists() and not (sys / "block" / "nbd0").exists():
        raise UnavailableError(
            "the kernel's nbd driver is not loaded",
            mend="Load it: modprobe nbd (a kernel built without it needs another front end: "
            "--frontend fuse).",
        )
    try:
        family = link.family("nbd")
    except NotFoundError:
        if not _in_first_netns(proc):
            raise UnavailableError(
                "the kernel's nbd driver is out of reach in a network namespace of its own",
                mend="Start the device in the host's network namespace, or use --frontend fuse.",
            ) from None
        raise UnavailableError(
            "the kernel's nbd driver is too old: it has no netlink interface", mend=_MEND_FUSE
        ) from None
    if family.attribute_max < _IDENTIFIER:
        raise UnavailableError(
            "the kernel's nbd driver is too old: its devices carry no identifier (Linux 5.14 is "
            "the first), so one left behind could not be told from a stranger's",
            mend=_MEND_FUSE,
        )
    return family


def _in_first_netns(proc: Path) -> bool:
    """True, too, where it cannot be known."""
    try:
        return os.readlink(proc / "self/ns/net") == os.readlink(proc / "1/ns/net")
    except OSError:
        return True


def _sockets(descriptors: Sequence[int]) -> bytes:
    items = (genl.nested(_SOCKET_ITEM, genl.u32(_SOCKET_FD, fd)) for fd in descriptors)
    return genl.nested(_SOCKETS, *items)


def connect(
    link: Link, descriptors: Sequence[int], *, size_bytes: int, identifier: str, sys: Path = SYS
) -> int:
    """Makes a free device of these sockets, one connection each, and returns its index.

    The kernel keeps the sockets; the caller's descriptors may be closed afterwards.

    Raises:
        UnavailableError: see `find_family`; or the kernel has no number left.
        NotPermittedError: not root where it matters.
        SystemCallError: another refusal; the kernel's log says more.
    """
    family = find_family(link, sys=sys)
    try:
        answers = link.ask(
            family,
            _CONNECT,
            genl.u64(_SIZE, size_bytes)
            + genl.u64(_BLOCK_SIZE, PAGE_BYTES)
            + genl.u64(_TIMEOUT, REQUEST_TIMEOUT_S)
            + genl.u64(_DEAD_CONNECTION, DEAD_CONNECTION_S)
            + genl.u64(_SERVER_FLAGS, _FLAGS)
            + genl.u64(_CLIENT_FLAGS, _NO_CLIENT_FLAGS)
            + genl.text(_IDENTIFIER, identifier)
            + _sockets(descriptors),
        )
    except NotPermittedError as error:
        raise NotPermittedError(
            "the kernel lets only root of the host make nbd devices",
            mend=rights.mend("CAP_SYS_ADMIN"),
        ) from error
    except SystemCallError as error:
        raise UnavailableError(
            f"the kernel makes no nbd device: {os.strerror(error.code)}",
            mend="See dmesg for its reason; devices that are no longer needed can be freed with "
            "nbd-client -d /dev/nbdN.",
        ) from error
    for answer in answers:
        for kind, value in genl.attributes(answer):
            if kind == _INDEX:
                return genl.number_of(value)
    raise SystemCallError("the kernel made an nbd device and did not say which")


def read_partitions(index: int) -> None:
    """Opens a new device once, as the kernel reads a partition table in the first open.

    Later that could be the open of somebody who wants to take away what a dead process has left:
    it would wait for an answer, and everybody who opens the device with it.

    Raises:
        SystemCallError: it cannot be opened.
    """
    try:
        os.close(os.open(f"/dev/nbd{index}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise from_oserror(f"cannot open /dev/nbd{index}", error) from error


def reconnect(link: Link, index: int, descriptor: int, *, identifier: str, timeout_s: int) -> None:
    """Gives a device of ours another socket in place of a dead one.

    Without a dead one the kernel drops the socket and says nothing: its other end hangs up then,
    as soon as the caller has closed `descriptor`.

    Raises:
        NotPermittedError, SystemCallError: refused: not connected, or not that identifier.
    """
    link.ask(
        link.family("nbd"),
        _RECONFIGURE,
        genl.u32(_INDEX, index)
        + genl.text(_IDENTIFIER, identifier)
        + genl.u64(_TIMEOUT, timeout_s)
        + _sockets([descriptor]),
    )


def disconnect(link: Link, index: int) -> None:
    """Fails the requests under way; the device is free when the last process has closed it.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    link.ask(link.family("nbd"), _DISCONNECT, genl.u32(_INDEX, index))


def wait_free(index: int, *, timeout_s: float = FREE_S_MAX, sys: Path = SYS) -> None:
    """After `disconnect`: waits until the kernel has let go of the device, and gives it the
    kernel's own throttling back.

    Raises:
        DeadlineError: somebody has it open.
    """
    end_s = time.monotonic() + timeout_s
    while device(index, sys=sys) is not None:
        if time.monotonic() >= end_s:
            raise DeadlineError(
                "the nbd device is disconnected, but a process still has it open",
                where=f"/dev/nbd{index}",
                mend=f"See who has it: fuser -v /dev/nbd{index}.",
            )
        time.sleep(0.02)
    block.tune(f"nbd{index}", block.GIVEN_BACK, sys=sys)


def tune(index: int, requests: int, *, in_use: bool = False, sys: Path = SYS) -> tuple[str, ...]:
    """Best effort: writes QUEUE_SETTINGS, and no throttling; returns the names of those that the
    kernel refused.

    Args:
        index: of the device.
        requests: how many one connection may have under way.
        in_use: leaves throttling as it is: the kernel changes it once nothing is under way, and the
            caller serves what is.
        sys: where /sys is.
    """
    throttling = () if in_use else block.NOT_THROTTLED
    settings = (*throttling, *QUEUE_SETTINGS, ("nr_requests", str(requests)))
    return block.tune(f"nbd{index}", settings, sys=sys)
