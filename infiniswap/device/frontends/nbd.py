# SPDX-License-Identifier: Apache-2.0
"""nbd: the kernel's own nbd client, several connections to the engine's NBD server.

A connection is a socket pair: one end goes to the kernel, the other to the engine, and neither has
a name, so no other process can reach it. When the kernel loses patience with a connection, it shuts
down and sends what was in flight on another; `repair` then replaces it. When the process dies, the
requests wait in the kernel until a successor's `take_over` has brought new sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from infiniswap.device.frontends import in_use
from infiniswap.device.frontends.base import (
    Condition,
    FrontEnd,
    KernelDevice,
    Leftover,
    Owner,
    Places,
    owner_of,
)
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.protocol import Engine, Frontend, FrontendConfig
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
    from_oserror,
)
from infiniswap.system import nbd
from infiniswap.system.genl import GenericNetlink

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 4
_REQUESTS_MIN: Final = 4
"""Fewer for one connection are not accepted by the kernel."""

_SOCKET_BYTES: Final = 1 << 20
_TAKEN_S_MAX: Final = 30.0
_TAKEN_PAUSE_S: Final = 0.02
_CALM_S: Final = 600.0
_IDENTIFIER: Final = re.compile(r"infiniswap:(?P<connections>[1-9][0-9]?):(?P<run>/.+)", re.DOTALL)


def check() -> None:
    """Whether this host has what it takes.

    Raises:
        UnavailableError: what is missing, and how to mend it.
    """
    with GenericNetlink() as link:
        nbd.find_family(link)


def connections_for(requests_max: int) -> int:
    """How many connections a device has: one for each processor, as long as there are requests."""
    return max(1, min(CONNECTIONS_MAX, os.cpu_count() or 1, requests_max // _REQUESTS_MIN))


def identifier_of(paths: DevicePaths, connections: int) -> str:
    """What the kernel knows a device by: a successor learns the number of connections from it."""
    return f"infiniswap:{connections}:{os.path.realpath(paths.run)}"


def find_left(paths: DevicePaths) -> tuple[tuple[nbd.NbdDevice, int], ...]:
    """The kernel's devices with this one's identifier, and their numbers of connections."""
    wanted = os.path.realpath(paths.run)
    return tuple(
        (device, int(match["connections"]))
        for device in nbd.devices()
        if (match := _IDENTIFIER.fullmatch(device.identifier)) and match["run"] == wanted
    )


def run_of(device: nbd.NbdDevice) -> Path | None:
    """The run directory of the device process that made it, None when it is none of ours."""
    match = _IDENTIFIER.fullmatch(device.identifier)
    return Path(match["run"]) if match else None


class NbdKernel(KernelDevice):
    """A KernelDevice. Each field is set once that step stands."""

    def __init__(self, paths: DevicePaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()  # repair and detach come from different threads
        self._frontend: Frontend | None = None
        self._index: int | None = None
        self._connections = 0
        self._identifier = ""
        self._timeout_s = nbd.REQUEST_TIMEOUT_S
        self._repaired_s = 0.0

    @property
    def block_device(self) -> Path | None:
        """The nbd device."""
        return None if self._index is None else Path(f"/dev/nbd{self._index}")

    @property
    def path(self) -> str:
        """The nbd device, also before it exists."""
        return "/dev/nbd" if self._index is None else f"/dev/nbd{self._index}"

    # ----------------------------------------------------------------------- attach

    def attach(self, engine: Engine) -> None:
        """The engine's ends first, because the kernel reads while it connects."""
        frontend = self._begin(engine, None)
        with contextlib.ExitStack() as stack:
            kernel_ends = [
                stack.enter_context(self._serve_one(frontend)) for _ in range(self._connections)
            ]
            with GenericNetlink() as link:
                self._index = nbd.connect(
                    link,
                    [end.fileno() for end in kernel_ends],
                    size_bytes=frontend.info().size_bytes,
                    identifier=self._identifier,
                )
        self._tune(frontend)
        nbd.read_partitions(self._index)

    def prepare(self, engine: Engine, note: bytes) -> None:
        """Buffers and threads.

        Raises:
            NotFoundError: the predecessor has no device.
            ConflictError: it is of another size, or more than one.
        """
        del note
        device, connections = self._find_one()
        frontend = self._begin(engine, connections)
        size_bytes = frontend.info().size_bytes
        if device.size_bytes != size_bytes:
            raise ConflictError(
                f"{device.path} has {device.size_bytes} bytes, the device {size_bytes}",
                where=f"device {self._paths.name}",
                mend="Start it with the size it had.",
            )

    def _find_one(self) -> tuple[nbd.NbdDevice, int]:
        left = find_left(self._paths)
        if not left:
            raise NotFoundError(
                "there is no nbd device of an earlier process", where=f"device {self._paths.name}"
            )
        if len(left) > 1:
            listed = ", ".join(str(device.path) for device, _ in left)
            raise ConflictError(
                f"several nbd devices are of this one: {listed}",
                where=f"device {self._paths.name}",
                mend="Free those that are not in use: nbd-client -d /dev/nbdN.",
            )
        return left[0]

    def take_over(self, descriptors: Mapping[str, int]) -> None:
        """Takes over the device that a dead process left in the kernel.

        Requests that wait there continue with the first new connection; the kernel sends those that
        were in flight again after `nbd.REQUEST_TIMEOUT_S`. The engine has the predecessor's
        contents, and none of the predecessor's writes can still land: the engine holds the
        backup's lock, and the leases are fenced.

        Raises:
            NotFoundError: the kernel has no such device.
            InfiniswapError: the kernel's refusal.
        """
        del descriptors
        frontend = self._frontend
        assert frontend is not None
        device, connections = self._find_one()
        self._index = device.index
        with GenericNetlink() as link:
            for _ in range(connections):
                self._replace_one(link, frontend)
        self._tune(frontend, in_use=True)

    def _begin(self, engine: Engine, connections: int | None) -> Frontend:
        frontend = engine.frontend("nbd", FrontendConfig(request_bytes_max=nbd.REQUEST_BYTES_MAX))
        self._frontend = frontend
        self._connections = connections or connections_for(frontend.info().requests_max)
        self._identifier = identifier_of(self._paths, self._connections)
        return frontend

    def _tune(self, frontend: Frontend, *, in_use: bool = False) -> None:
        assert self._index is not None
        # No more requests than buffers, so that no read waits behind writes that wait.
        requests = max(_REQUESTS_MIN, frontend.info().requests_max // self._connections)
        refused = nbd.tune(self._index, requests, in_use=in_use)
        if refused:
            log.info("nbd device: the kernel refused to set %s", ", ".join(refused))

    def _serve_one(self, frontend: Frontend) -> socket.socket:
        """A connection that the engine serves; returns the kernel's end."""
        engine_end, kernel_end = _socket_pair()
        try:
            with engine_end:
                frontend.serve(engine_end.fileno())
        except BaseException:
            kernel_end.close()
            raise
        return kernel_end

    # ----------------------------------------------------------------------- repair

    def repair(self) -> None:
        """Replaces connections that have ended while this process lives.

        A living process that was too slow would be too slow again: the kernel's patience is
        doubled each time, until nothing has happened for a while.

        Raises:
            InfiniswapError: the kernel takes no new ones; the caller tries again.
        """
        with self._lock:
            frontend = self._frontend
            if frontend is None or self._index is None:
                return
            missing = self._connections - frontend.info().connections
            if missing <= 0:
                return
            now_s = time.monotonic()
            calm = now_s - self._repaired_s > _CALM_S
            self._timeout_s = min(
                2 * (nbd.REQUEST_TIMEOUT_S if calm else self._timeout_s),
                nbd.REQUEST_TIMEOUT_S_MAX,
            )
            self._repaired_s = now_s
            log.warning(
                "the kernel gave up %d of %d connections of %s, as an answer took too long; they "
                "are replaced, and answers may now take %d s",
                missing,
                self._connections,
                self.path,
                self._timeout_s,
            )
            with GenericNetlink() as link:
                for _ in range(missing):
                    self._replace_one(link, frontend)

    def _replace_one(self, link: GenericNetlink, frontend: Frontend) -> None:
        """Offers new sockets until the kernel takes one: it notices a dead connection a bit later
        than we do, and drops a socket that it does not need yet."""
        assert self._index is not None
        end_s = time.monotonic() + _TAKEN_S_MAX
        while True:
            engine_end, kernel_end = _socket_pair()
            with engine_end:
                with kernel_end:
                    nbd.reconnect(
                        link,
                        self._index,
                        kernel_end.fileno(),
                        identifier=self._identifier,
                        timeout_s=self._timeout_s,
                    )
                if not _hung_up(engine_end):
                    frontend.serve(engine_end.fileno())
                    return
            if time.monotonic() >= end_s:
                raise DeadlineError(
                    "the kernel takes no new connection, as it has no dead one",
                    where=self.path,
                    mend="See whether another process serves it; dmesg tells what nbd does.",
                )
            time.sleep(_TAKEN_PAUSE_S)

    def is_ours(self) -> bool:
        """By the identifier. One that is merely disconnected is `repair`'s."""
        now = None if self._index is None else nbd.device(self._index)
        return now is None or now.identifier == self._identifier

    def attach_again(self) -> None:
        """Cannot be done while the engine has connections to the former one.

        Raises:
            UnavailableError: always.
        """
        raise UnavailableError(
            "its nbd device was disconnected", mend=f"infiniswap device restart {self._paths.name}"
        )

    # ----------------------------------------------------------------------- detach

    def detach(self) -> None:
        """Disconnects it.

        Raises:
            ConflictError: it is in use; everything stays.
        """
        with self._lock:
            if self._index is not None and self.is_ours():
                _free(self._index, self._paths.name)
            self._index = None
            if self._frontend is not None:
                self._frontend.close()
                self._frontend = None


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise from_oserror("cannot make a connection for the kernel", error) from error
    for end in pair:  # a request, or an answer, fits in as a whole
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SOCKET_BYTES)
    return pair


_SO_SNDBUFFORCE: Final = 32


def _hung_up(end: socket.socket) -> bool:
    poll = select.poll()
    poll.register(end.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _free(index: int, name: str) -> None:
    """Keeps others from using it meanwhile: it is held exclusively until it no longer exists."""
    device = nbd.device(index)
    if device is None:
        return  # an administrator was faster
    with in_use.held(device.path, name), GenericNetlink() as link:
        nbd.disconnect(link, index)
    try:
        nbd.wait_free(index)
    except DeadlineError as error:
        log.warning("%s", error)  # open for reading only, and it reads nothing now


def clear(paths: DevicePaths) -> None:
    """As FrontEnd says."""
    for device, _ in find_left(paths):
        in_use.check_left_unused(
            device.path,
            paths.name,
            f"End the programs whose memory is there, then `nbd-client -d {device.path}` and "
            "`swapoff` it, or restart the host.",
        )
        log.warning("%s: nbd device of an earlier process removed", device.path)
        _free(device.index, paths.name)


def give_up(paths: DevicePaths) -> tuple[Path, ...]:
    """As FrontEnd says."""
    left = find_left(paths)
    if left:
        with GenericNetlink() as link:
            for device, _ in left:
                nbd.disconnect(link, device.index)
    return tuple(device.path for device, _ in left)


def examine(places: Places) -> Iterator[Condition]:
    """As FrontEnd says. Where nbd is missing, fuse takes its place."""
    del places
    try:
        check()
    except UnavailableError as error:
        yield Condition("nbd", f"no front end nbd: {error.what}", error.mend)
    else:
        yield Condition("nbd", "the kernel's nbd driver can be used")


def owners(run_dir: Path, places: Places) -> Iterator[tuple[Path, Owner]]:
    """As FrontEnd says."""
    for device in nbd.devices(sys=places.sys):
        if (run := run_of(device)) is not None:
            yield device.path, owner_of(run, run_dir, f"nbd-client -d {device.path}")


def leftovers(run_dir: Path, died: Collection[str], places: Places) -> Iterator[Leftover]:
    """As FrontEnd says."""
    for path, owner in owners(run_dir, places):
        if not owner.alive and owner.name not in died:
            yield Leftover(
                f"{path}: an nbd device of {owner.name}, which no process serves",
                # In this order: what waits for the process fails, so that swapoff can end.
                f"nbd-client -d {path}; swapoff {path}",
            )


FRONT_END: Final = FrontEnd(
    name="nbd",
    check=check,
    make=NbdKernel,
    clear=clear,
    give_up=give_up,
    examine=examine,
    owners=owners,
    leftovers=leftovers,
)
