# SPDX-License-Identifier: Apache-2.0
"""The two faces of every front end: an entry of the table FRONT_ENDS, and a KernelDevice for each
device that uses it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infiniswap.device.spec.rundir import LINK_DIR, DevicePaths, is_running
from infiniswap.engine.protocol import Engine
from infiniswap.errors import NotPermittedError, UnavailableError
from infiniswap.system.files import PROC, SYS


@dataclass(frozen=True, slots=True)
class Handover:
    """A front end leaves this to its successor.

    Attributes:
        descriptors: by name (`[a-z0-9-]`, at most 23 characters); the holder keeps copies.
        note: everything else the successor must know; a standby has it in locked memory from the
            start.
    """

    descriptors: Mapping[str, int] = field(default_factory=dict)
    note: bytes = b""


class KernelDevice(ABC):
    """One device's connection to the kernel. All methods block; none runs on the event loop.

    The methods with a body suit a front end whose device nobody can take away and whose successor
    needs nothing.
    """

    @property
    def block_device(self) -> Path | None:
        """The node in /dev; None while there is none, and always for nbd-socket."""
        return None

    @property
    @abstractmethod
    def path(self) -> str:
        """What users see: the block device, or the socket of nbd-socket."""

    @abstractmethod
    def attach(self, engine: Engine) -> None:
        """Makes the block device.

        When it fails, the caller calls `detach`, which takes away what stood already.

        Raises:
            InfiniswapError: the step that failed.
        """

    def repair(self) -> None:
        """Called after CONNECTION_LOST, and when events were lost: replaces what has broken.

        Raises:
            InfiniswapError: it failed this time; call it again later.
        """
        return

    def is_ours(self) -> bool:
        """Whether `block_device` is still the one that this process serves: nobody has detached it,
        so that its number is free for others. Reads /sys alone, and is called often."""
        return True

    def attach_again(self) -> None:
        """After `is_ours` has said no: makes another block device for the engine that still serves.

        Raises:
            InfiniswapError: it failed this time, or this front end never can.
        """
        raise UnavailableError(f"{self.path} cannot be attached again")

    def is_left(self) -> bool:
        """After FRONTEND_DOWN: whether the kernel still has the device, so that a successor could
        take it over though this process can serve it no longer.

        Raises:
            InfiniswapError: the kernel did not say.
        """
        return False

    def handover(self) -> Handover:
        """What a successor needs of this process. Called once, after `attach` or `take_over`.

        Raises:
            UnavailableError: no process could take over on this host, and why.
        """
        return Handover()

    @abstractmethod
    def prepare(self, engine: Engine, note: bytes) -> None:
        """In a standby, while its predecessor serves: allocates all that `take_over` needs.

        Args:
            engine: a standby, too.
            note: the predecessor's.

        Raises:
            InfiniswapError: this process could never take over.
        """

    @abstractmethod
    def take_over(self, descriptors: Mapping[str, int]) -> None:
        """In a successor, after `prepare`: serves what its predecessor left attached.

        Opens and reads as little as it can, because files on this device cannot be read yet. When
        it fails it detaches nothing, as another successor may succeed. The engine serves already.

        Args:
            descriptors: copies of the predecessor's, now ours to close.

        Raises:
            NotFoundError: nothing is left that any process could take over.
            InfiniswapError: the step that failed.
        """

    def rings(self) -> tuple[int, ...]:
        """Descriptors of the io_urings by which the kernel hands requests to this process; they
        must outlive it. Called after `attach` or `prepare`."""
        return ()

    @abstractmethod
    def detach(self) -> None:
        """Takes the block device away, then what is below it. Idempotent.

        Raises:
            ConflictError: the block device is in use; it and everything below it stays.
        """


@dataclass(frozen=True, slots=True)
class Places:
    """The directories in which a host's devices are looked for; tests pass others."""

    proc: Path = PROC
    sys: Path = SYS
    dev: Path = Path("/dev")
    links: Path = LINK_DIR


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that a front end needs of a host, for `infiniswap doctor`.

    Attributes:
        name: of the finding.
        what: whether the host has it, and details.
        mend: the command that supplies it; empty: the host has it.
    """

    name: str
    what: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that a dead process has left; `mend` is the command that takes it away."""

    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Owner:
    """The device behind a block device; `mend` takes away what is left of a dead one."""

    name: str
    alive: bool
    mend: str


def owner_of(run: Path, run_dir: Path, by_hand: str) -> Owner:
    """The owner with that run directory.

    Args:
        run: of the device.
        run_dir: the configured directory of run directories.
        by_hand: what takes it away when `run` is not in there.
    """
    ours = os.path.realpath(run.parent) == os.path.realpath(run_dir)
    return Owner(
        run.name, is_served(run), f"infiniswap device remove {run.name}" if ours else by_hand
    )


def is_served(run: Path) -> bool:
    """Whether a process serves the device of that run directory."""
    try:
        return is_running(DevicePaths(run.name, run, run))
    except NotPermittedError:
        return True  # somebody's, at any rate


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A way to make a block device of a device's bytes. Docs: its row in docs/frontends.md.

    Attributes:
        name: in the configuration, and of the C library's front end.
        check: raises UnavailableError, NotPermittedError: what this host lacks, and how to mend it.
            May load a module of the kernel.
        would_load: whether `check` would load a module that is there and is not loaded.
        make: the connection to the kernel of the device with these paths, not attached yet.
        clear: takes away what a killed process of the device left attached. ConflictError: it is
            still in use (as swap space whose contents are gone, or mounted): only the user can end
            that.
        give_up: fails all requests that wait for a process of the device, as none will come;
            returns the block devices that can now be taken out of use.
        examine: lists what this host has and lacks, for doctor; loads no module.
        owners: finds the block devices of all infiniswap devices. Takes the directory of run
            directories.
        leftovers: finds what no process serves, except of the devices with these names.
        is_needed: True: no job can run without it; False: another front end takes its place.
        is_block_device: False: nothing can swap on it, and it needs no rights.
        packages: Debian packages that a build without it lacks; empty: every build has it.
        warning: shown when the device is swap space for programs without a memory limit.
    """

    name: str
    check: Callable[[], None]
    make: Callable[[DevicePaths], KernelDevice]
    clear: Callable[[DevicePaths], None]
    would_load: Callable[[], bool] = lambda: False
    give_up: Callable[[DevicePaths], tuple[Path, ...]] = lambda _paths: ()
    examine: Callable[[Places], Iterator[Condition]] = lambda _places: iter(())
    owners: Callable[[Path, Places], Iterator[tuple[Path, Owner]]] = lambda *_: iter(())
    leftovers: Callable[[Path, Collection[str], Places], Iterator[Leftover]] = lambda *_: iter(())
    is_needed: bool = False
    is_block_device: bool = True
    packages: str = ""
    warning: str = ""
