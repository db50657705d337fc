# SPDX-License-Identifier: Apache-2.0
"""The home of slabs and records, which outlives a daemon: a tmpfs of its own.

    RUN_DIR/DONOR_ID/             the mount; held with flock by the daemon that runs
                    donor.json    whose it is (infiniswap.donor.records)
                    leases/       one record per lease
                    slabs/        one file per slab (csrc/store/slab_dir.h)

It is a mount of its own because of its options: the size of the pool, huge pages where they are
configured, and no swapping, which nothing else prevents while no daemon has the slabs locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.directories import make_directory
from infiniswap.donor.records import FORMAT, FORMAT_OF_PROTOCOL_1, DonorRecord, FileRecords
from infiniswap.errors import ConflictError, InfiniswapError, NotPermittedError, from_oserror
from infiniswap.system import mounts
from infiniswap.system.files import PROC, check_own_directory, read_text
from infiniswap.units import MIB

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
"""How long a daemon waits for the end of its predecessor."""

_RECORDS_BYTES = 64 * MIB
"""Beside the pool, for records and the file system's own needs; taken only where used."""


Release = Callable[[float], None]
"""Gives a home back after so many seconds, unless a successor has come. 0: it is empty, and is gone
on return."""


def home_bytes(pool_bytes: int) -> int:
    """What the tmpfs of a pool may hold."""
    return pool_bytes + _RECORDS_BYTES


@dataclass(frozen=True, slots=True)
class NoHome:
    """Why slabs end with the daemon.

    Attributes:
        reason: for the log.
        is_chosen: by the configuration; otherwise the host lacks something.
    """

    reason: str
    is_chosen: bool = False


class Home:
    """The directory of a daemon, held until `close`. Methods block, for a worker thread.

    Attributes:
        path: of the mount.
        records: what is written down there.
        missing_options: of the mount, which this kernel does not know.
        incarnation: once entered, the one to go by: the predecessor's if its slabs are taken over.
        keeps: whether `leave` leaves the slabs to a successor.
    """

    def __init__(self, path: Path, descriptor: int, missing_options: tuple[str, ...]) -> None:
        self.path = path
        self.records = FileRecords(path)
        self.missing_options = missing_options
        self.incarnation = ""
        self.keeps = True
        self._descriptor = descriptor

    @property
    def slabs(self) -> Path:
        """For the store."""
        return self.path / "slabs"

    def enter(self, donor_id: str, slab_bytes: int, incarnation: str) -> None:
        """Takes over the slabs there if they are this donor's; otherwise removes them.

        Raises:
            InfiniswapError: it cannot be written there.
        """
        boot_id = read_text(PROC / "sys/kernel/random/boot_id", "cannot read the boot id").strip()
        own = DonorRecord(FORMAT, donor_id, incarnation, slab_bytes, boot_id)
        found = self.records.donor()
        reason = _not_own(found, own)
        self._check_old(found, own)
        if found is None or reason:
            if any(self.path.iterdir()):
                log.warning("what lies in %s is not served: %s", self.path, reason)
            # First, so that a half-removed home does not pass for the former daemon's.
            self.records.remove_donor()
            self._empty()
        else:
            own = DonorRecord(FORMAT, donor_id, found.incarnation, slab_bytes, boot_id)
        try:
            self.slabs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise from_oserror("cannot make a directory", error, where=str(self.slabs)) from error
        # Also if it says the same: by its time `--release` sees that a successor has come.
        self.records.save_donor(own)
        self.incarnation = own.incarnation

    def _check_old(self, found: DonorRecord | None, own: DonorRecord) -> None:
        """Refuses to take slabs from devices that could not come for them."""
        is_own = found is not None and (found.boot_id, found.donor_id) == (
            own.boot_id,
            own.donor_id,
        )
        if is_own and self.is_of_protocol_1_and_lent():
            raise ConflictError(
                "devices of protocol version 1 have slabs here, and this release does not speak "
                "that version",
                where=str(self.path),
                mend="Start the former release's daemon again, stop the devices, then upgrade. Or "
                "give the slabs up with `infiniswap daemon --release`: the devices go on with "
                "their backups, and one without a backup loses what is here.",
            )

    def is_of_protocol_1_and_lent(self) -> bool:
        """Whether devices of protocol version 1 have slabs here: no daemon of this release can
        take them over."""
        found = self.records.donor()
        is_old = found is not None and found.format == FORMAT_OF_PROTOCOL_1
        return is_old and self.records.has_leases()

    def _empty(self) -> None:
        for entry in self.path.iterdir():
            try:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            except OSError as error:
                raise from_oserror("cannot be removed", error, where=str(entry)) from error

    def close(self) -> None:
        """Leaves everything there for a successor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def leave(self, grace_s: float, release: Release | None = None) -> None:
        """At the end of the daemon: removes it, or leaves it to a successor that comes within this
        time. Errors are logged.

        Args:
            grace_s: that time.
            release: does so; None: it stays until somebody asks for it.
        """
        try:
            if not self.keeps:
                self.remove()
                if release is not None:
                    release(0)
                return
            self.close()
            log.info(
                "what is lent stays in %s for a restarted daemon, for %g s; `infiniswap daemon "
                "--release` gives it back at once",
                self.path,
                grace_s,
            )
            if release is not None:
                release(grace_s)
        except InfiniswapError as error:
            log.error("%s", error)

    def remove(self) -> None:
        """Gives the memory back and takes the directory away. Raises InfiniswapError."""
        self.records.remove_donor()
        self._empty()
        if own_mount(self.path) is not None:
            # Root has mounted it for a daemon without that right: it stays, without memory.
            with contextlib.suppress(NotPermittedError):
                mounts.unmount(self.path, lazy=True)  # lazily: our own lock is a use
        self.close()
        with contextlib.suppress(OSError):
            self.path.rmdir()
        with contextlib.suppress(OSError):  # other daemons have theirs there
            self.path.parent.rmdir()


def _not_own(found: DonorRecord | None, own: DonorRecord) -> str:
    if found is None:
        return "there is no record of the daemon that had it"
    for name, what in (
        ("format", "another version wrote it"),
        ("boot_id", "it is of another boot"),
        ("donor_id", "it is another donor's"),
        ("slab_bytes", "the size of slabs was another one"),
    ):
        if getattr(found, name) != getattr(own, name):
            return what
    return ""


def own_mount(path: Path) -> mounts.Mount | None:
    """The tmpfs that is mounted at the path itself."""
    mount = mounts.mount_of(path)
    is_own = mount.fs_type == "tmpfs" and mount.mount_point == os.path.realpath(path)
    return mount if is_own else None


def open_home(run_dir: Path | None, donor_id: str, pool_bytes: int) -> Home | NoHome:
    """The home of that donor, mounted and locked; or why there is none.

    Raises:
        ConflictError: another daemon has it.
    """
    if run_dir is None:
        return NoHome("daemon.run_dir is empty", is_chosen=True)
    path = run_dir / donor_id
    try:
        missing = mount(path, pool_bytes)
    except (OSError, InfiniswapError) as error:
        return NoHome(f"no tmpfs can be mounted at {path} ({error})")
    return Home(path, _lock(path, LOCK_WAIT_S), missing)


def mount(path: Path, pool_bytes: int) -> tuple[str, ...]:
    """Mounts the home of a pool where it is not mounted yet, and gives it the right size.

    Returns:
        Options of the mount that this kernel does not know.

    Raises:
        OSError, InfiniswapError: it cannot be mounted.
    """
    make_run_dir(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        return _mount(path, home_bytes(pool_bytes))
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def make_run_dir(run_dir: Path, user: str = "") -> None:
    """Makes the directory of homes, which everybody may look into: a home is closed itself. Of one
    that is there, and that an older release may have made for its user alone, the mode is mended.

    Args:
        run_dir: the directory, or one in it.
        user: may own it beside root and this user. Never of a directory in which root mounts.

    Raises:
        OSError: it cannot be made.
        NotPermittedError: others may change what is in it: they could put another file in the
            place of a home or a socket.
    """
    try:
        make_directory(run_dir.parent, 0o755)
        run_dir.mkdir(mode=0o755)
    except FileExistsError:
        check_own_directory(run_dir, "daemon.run_dir", user)
        status = run_dir.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
    run_dir.chmod(0o755)  # whatever the umask is


def _mount(path: Path, size_bytes: int) -> tuple[str, ...]:
    mount = own_mount(path)
    if mount is None:
        return mounts.mount_tmpfs(path, size_bytes, mode=0o700)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConflictError("the tmpfs there is another user's, or open to others", where=str(path))
    resize(path, size_bytes)
    return tuple(option for option in mounts.TMPFS_OPTIONS if option not in mount.super_options)


def resize(path: Path, size_bytes: int) -> None:
    """Changes how much the tmpfs of a home may hold, unless it is right; a refusal is logged."""
    room = os.statvfs(path)
    if room.f_blocks * room.f_frsize == size_bytes:
        return  # root has seen to it, for a daemon that is another user's
    try:
        mounts.resize_tmpfs(path, size_bytes)
    except InfiniswapError as error:
        # More is lent than the pool may have now; slabs come back one by one.
        log.warning("%s", error)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds a home; None: another one does, or it has just been removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here, held = path.stat(), os.fstat(descriptor)
        if (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _lock(path: Path, wait_s: float) -> int:
    end_s = time.monotonic() + wait_s
    while True:
        try:
            descriptor = try_lock(path)
        except OSError as error:
            raise from_oserror("cannot be opened", error, where=str(path)) from error
        if descriptor is not None:
            return descriptor
        if time.monotonic() > end_s:
            raise ConflictError(
                "the address is in use: another daemon has it, and its slabs",
                where=str(path),
                mend="Give another address with --listen, or end that daemon.",
            )
        time.sleep(0.05)


# ------------------------------------------------------------------- of daemons that are gone


@dataclass(frozen=True, slots=True)
class OrphanedHome:
    """The home of a daemon that does not run.

    Attributes:
        path: where.
        used_bytes: memory.
        is_roots: whether its daemon was root's: an orderly end unmounts it. Another user's stays
            mounted and empty, because only root unmounts.
        started_ns: when its daemon wrote its record; another value means another daemon.
    """

    path: Path
    used_bytes: int
    is_roots: bool
    started_ns: int


def leftovers(run_dir: Path) -> list[OrphanedHome]:
    """Homes that no daemon has now. Raises InfiniswapError."""
    return [found for path in _homes(run_dir) if (found := _look(path)) is not None]


def _homes(run_dir: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(path for path in run_dir.iterdir() if path.is_dir())


def _look(path: Path) -> OrphanedHome | None:
    try:
        descriptor = try_lock(path)
        if descriptor is None:
            return None
        os.close(descriptor)
        started_ns = 0
        with contextlib.suppress(OSError):
            started_ns = (path / "donor.json").stat().st_mtime_ns
        if own_mount(path) is None:
            return None
        room = os.statvfs(path)
        used_bytes = (room.f_blocks - room.f_bfree) * room.f_frsize
        return OrphanedHome(path, used_bytes, path.stat().st_uid == 0, started_ns)
    except (OSError, InfiniswapError):
        return None


def release(leftover: OrphanedHome, *, asked: bool = True) -> bool:
    """Gives the memory of a stopped daemon back; False: a successor has come meanwhile.

    Args:
        leftover: which.
        asked: by a person. Otherwise the slabs of devices of protocol version 1 stay: the daemon
            that would have come for them within that time was upgraded, and refuses to.

    Raises:
        ConflictError: such slabs stay.
        InfiniswapError: it cannot be removed.
    """
    now = _look(leftover.path)
    try:
        descriptor = try_lock(leftover.path)
    except OSError:
        return False
    if descriptor is None:
        return False
    if now is None or now.started_ns != leftover.started_ns:
        os.close(descriptor)
        return False
    home = Home(leftover.path, descriptor, ())
    try:
        if not asked and home.is_of_protocol_1_and_lent():
            raise ConflictError(
                "devices of protocol version 1 have slabs here, which are kept for them",
                where=str(leftover.path),
                mend="Start the former release's daemon again and stop these devices. `infiniswap "
                "daemon --release` gives the memory back at once.",
            )
        home.remove()
    finally:
        home.close()
    return True
