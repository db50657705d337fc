# SPDX-License-Identifier: Apache-2.0
"""Where devices are recorded, so that any shell finds them.

A running device has `RUN_DIR/NAME/` with `device.json` (its spec), `control.sock` (its control
API), `far.sock` (for jobs with far memory), `lock` (held by its process and the holder: this lock,
not a pid, says whether it runs), `state` (for a successor), `runs/` (the runs that use it), `mnt/`
(the fuse mount) and `log`. A stopped device whose contents are kept has `BACKUP_DIR/NAME.device`
(its spec) beside `NAME.backup`, `NAME.tables` and `NAME.key`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from infiniswap import rights
from infiniswap.config import DEVICE_SOCKET
from infiniswap.control.text import clean_text
from infiniswap.device.spec.spec import DeviceSpec, check_name, decode_spec, encode_spec, is_name
from infiniswap.errors import (
    ConfigError,
    ConflictError,
    InfiniswapError,
    NotFoundError,
    NotPermittedError,
    UsageError,
    from_oserror,
)
from infiniswap.system.files import (
    check_own_directory,
    is_held,
    log_tail,
    read_own_file,
    replace_file,
    temporary_of,
    try_lock,
)
from infiniswap.units import SOCKET_PATH_BYTES_MAX

DEFAULT_RUN_DIR = Path("/run/infiniswap")
LINK_DIR = Path("/dev/infiniswap")
"""Where each device has a link to its block device."""

_RUN_DIR = "device.run_dir"
_BACKUP_DIR = "device.backup_dir"


class NotBelievedError(NotPermittedError):
    """Another user can have written the record of a device, so no command goes by it."""

    @property
    def state(self) -> str:
        """The state of such a device, in lists."""
        return f"not believed: {self.where}: {self.why}"

    def __init__(self, name: str, error: NotPermittedError) -> None:
        super().__init__(
            f"the record of device {name} is not believed: {error.what}",
            where=error.where,
            mend=error.mend,
        )
        self.why = error.what


class _Path:
    """A file below one of a device's directories; `{name}` in its name is the device's."""

    def __init__(self, directory: str, file: str) -> None:
        self._directory = directory
        self._file = file

    def __get__(self, paths: DevicePaths, _kind: type) -> Path:
        directory: Path = getattr(paths, self._directory)
        return directory / self._file.format(name=paths.name)


@dataclass(frozen=True, slots=True)
class DevicePaths:
    """Every path of one device."""

    name: str
    run: Path
    store: Path

    lock = _Path("run", "lock")
    """Held by the device process as long as it lives."""
    record = _Path("run", "device.json")
    """The spec of the running device."""
    socket = _Path("run", DEVICE_SOCKET)
    """Unix socket of the device's own control API."""
    member_socket = _Path("run", "members.sock")
    """Unix socket for members of the group."""
    far_socket = _Path("run", "far.sock")
    """Unix socket to which a job with far memory connects."""
    nbd_socket = _Path("run", "nbd.sock")
    """Unix socket of the nbd-socket front end."""
    mount = _Path("run", "mnt")
    """Mount point of the fuse front end."""
    log = _Path("run", "log")
    """Log of a device process in the background."""
    state = _Path("run", "state")
    """State of the engine, for a successor; in memory."""
    runs = _Path("run", "runs")
    """An empty file for each `run` that uses the device."""
    kept = _Path("store", "{name}.device")
    """The spec of a stopped device whose contents are kept."""
    tables = _Path("store", "{name}.tables")
    """Which pages the backup of a stopped device holds."""
    key = _Path("store", "{name}.key")
    """The key that seals what is kept, itself sealed with the host's."""
    backup = _Path("store", "{name}.backup")
    """The default backup."""


def paths_of(name: str, run_dir: Path, backup_dir: Path) -> DevicePaths:
    """Paths of a device, running or not.

    Raises:
        UsageError: a name that cannot be one, or a run directory whose path is too long.
    """
    paths = DevicePaths(check_name(name), run_dir / name, backup_dir)
    if len(os.fsencode(paths.socket)) > SOCKET_PATH_BYTES_MAX:
        raise UsageError(
            f"the path of the device's socket would be longer than {SOCKET_PATH_BYTES_MAX} bytes",
            where=str(paths.socket),
            mend="Use a shorter name, or a shorter device.run_dir.",
        )
    return paths


def take_lock(paths: DevicePaths) -> int:
    """Creates the device's run directory and takes its lock; the descriptor must stay open.

    Raises:
        ConflictError: a device of that name runs.
        NotPermittedError, SystemCallError: the directory cannot be made, or is another user's.
    """
    for directory in (paths.run.parent, paths.run):
        check_own_directory(directory, _RUN_DIR)
    lock = try_lock(paths.lock)
    if lock is not None:
        return lock
    raise ConflictError(
        f"a device named {paths.name} is running already",
        where=str(paths.run),
        mend=f"Choose another name, or stop it: infiniswap device stop {paths.name}.",
    )


def is_running(paths: DevicePaths) -> bool:
    """Whether a device process holds the lock.

    Raises:
        NotPermittedError: the device is another user's.
    """
    if not _may_be_ours(paths.run):
        raise NotPermittedError(
            f"another user has made the run directory of device {paths.name}",
            where=str(paths.run),
            mend=f"See whose it is: ls -ld {paths.run}.",
        )
    held = is_held(paths.lock)
    if held is None:
        raise NotPermittedError(
            "only the user who has started a device may look at it",
            where=str(paths.run),
            mend="Run it with sudo.",
        )
    return held


def write_record(path: Path, spec: DeviceSpec) -> None:
    """Writes a spec so that there is a whole one or none, for this user alone.

    Raises:
        NotPermittedError, SystemCallError: the file cannot be written.
    """
    try:
        replace_file(path, encode_spec(spec))
    except OSError as error:
        raise from_oserror("cannot record the device", error, where=str(path)) from error


def read_record(paths: DevicePaths) -> DeviceSpec | None:
    """The spec that a process of the device has recorded; None when there is none.

    Raises:
        ConfigError: it cannot be read.
        NotPermittedError: another user can have written it.
    """
    try:
        check_own_directory(paths.run.parent, _RUN_DIR)
    except NotPermittedError as error:
        raise NotBelievedError(paths.name, error) from error
    return _read_record(paths.record, paths.name, _RUN_DIR)


def read_kept(paths: DevicePaths) -> DeviceSpec | None:
    """The spec of a stopped device, as read_record."""
    return _read_record(paths.kept, paths.name, _BACKUP_DIR)


def _read_record(path: Path, name: str, key: str) -> DeviceSpec | None:
    try:
        data = read_own_file(path, key)
    except NotPermittedError as error:
        raise NotBelievedError(name, error) from error
    except OSError as error:
        raise from_oserror("cannot read the device's record", error, where=str(path)) from error
    if data is None:
        return None
    spec = decode_spec(data, str(path))
    if spec.name != name:
        raise ConfigError(
            f"the record of device {name} is that of device {clean_text(spec.name)}",
            where=str(path),
            mend="Give the file its own name back.",
        )
    return spec


def why_not_believed(paths: DevicePaths) -> NotBelievedError | None:
    """What is wrong with a record of the device; None: it has none that others can have written.
    A damaged one, or one that this user may not read, is no such record."""
    for read in (read_record, read_kept):
        try:
            read(paths)
        except NotBelievedError as error:
            return error
        except InfiniswapError:
            continue
    return None


def wrong_records(run_dir: Path, backup_dir: Path) -> list[InfiniswapError]:
    """What is wrong with the records that this user may read."""
    found: list[InfiniswapError] = []
    at_run = dict.fromkeys((*running_names(run_dir), *died_names(run_dir)), read_record)
    at_store = dict.fromkeys(stopped_names(run_dir, backup_dir), read_kept)
    for name, read in (*at_run.items(), *at_store.items()):
        paths = paths_of(name, run_dir, backup_dir)
        if read is read_record and os.geteuid() != 0 and not os.access(paths.record, os.R_OK):
            continue
        try:
            read(paths)
        except InfiniswapError as error:
            found.append(error)
    return found


def check_directories(run_dir: Path, backup_dir: Path) -> None:
    """Accepts directories in which nobody else can put records or other files of devices.

    Raises:
        NotPermittedError: somebody can.
    """
    check_own_directory(run_dir, _RUN_DIR)
    check_own_directory(backup_dir, _BACKUP_DIR)


def running_names(run_dir: Path) -> list[str]:
    """Names of the running devices, sorted."""
    return [name for name, runs in _names(run_dir) if runs]


def died_names(run_dir: Path) -> list[str]:
    """Names of the devices whose process has ended without stopping them, sorted."""
    return [
        name
        for name, runs in _names(run_dir)
        if not runs and DevicePaths(name, run_dir / name, run_dir).record.exists()
    ]


def _names(run_dir: Path) -> list[tuple[str, bool]]:
    try:
        # Other names are no devices; another user who may write here could have made them up.
        entries = sorted(
            entry.name
            for entry in run_dir.iterdir()
            if is_name(entry.name) and entry.is_dir() and _may_be_ours(entry)
        )
    except OSError:
        return []
    return [(name, _seems_running(DevicePaths(name, run_dir / name, run_dir))) for name in entries]


def _may_be_ours(run: Path) -> bool:
    """False of a run directory that another user than root and this one has made."""
    try:
        status = run.lstat()
    except OSError:
        return True  # not there, or not ours to look at
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid())


def _seems_running(paths: DevicePaths) -> bool:
    try:
        return is_running(paths)
    except NotPermittedError:
        return True  # a question to it will be refused with the reason


def stopped_names(run_dir: Path, backup_dir: Path) -> list[str]:
    """Names of the devices that are stopped with their contents kept, sorted."""
    running = set(running_names(run_dir))
    try:
        kept = sorted(p.stem for p in backup_dir.glob("*.device") if is_name(p.stem))
    except OSError:
        return []
    return [name for name in kept if name not in running]


def unseen(run_dir: Path, backup_dir: Path) -> list[str]:
    """Sentences that say why this user's lists of names may be incomplete."""
    closed = dict.fromkeys(map(rights.closed_directory, (run_dir, backup_dir)))
    return [
        f"this user may not look into {directory}, so devices may be missing here: sudo "
        "infiniswap device list"
        for directory in closed
        if directory is not None
    ]


def require_running(name: str, run_dir: Path, backup_dir: Path) -> DevicePaths:
    """Paths of a running device.

    Raises:
        NotFoundError: there is none; says whether it is stopped.
        NotBelievedError: nobody knows whether it is stopped: another user wrote its record.
    """
    paths = paths_of(name, run_dir, backup_dir)
    if is_running(paths):
        return paths
    if (doubt := why_not_believed(paths)) is not None:
        raise doubt
    if os.path.exists(paths.record):
        raise NotFoundError(
            f"the process of device {name} has died",
            where=str(paths.run),
            mend=f"{log_hint(paths, stays=True)} `infiniswap device start {name}` starts it again, "
            f"`infiniswap device remove {name}` takes away what it left behind.",
        )
    if os.path.exists(paths.kept):  # False as well where this user may not look
        raise NotFoundError(
            f"the device {name} is stopped",
            where=str(run_dir),
            mend=f"Start it again with `infiniswap device start {name}`, or delete it with "
            f"`infiniswap device remove {name}`.",
        )
    known = ", ".join(running_names(run_dir)) or "none"
    mend = f"Running devices: {known}. `infiniswap device list` shows all."
    if (closed := rights.closed_directory(backup_dir)) is not None:
        mend = (
            f"Running devices: {known}. Stopped ones are in {closed}, which is closed to this "
            "user: `sudo infiniswap device list` shows all."
        )
    raise NotFoundError(f"no device named {name} is running", where=str(run_dir), mend=mend)


def write_log(paths: DevicePaths) -> None:
    """Turns this process's standard output and error into the device's log.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    try:
        # Read, too: its last page gets mapped.
        log = os.open(paths.log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            for stream in (1, 2):
                os.dup2(log, stream)
        finally:
            os.close(log)
    except OSError as error:
        raise from_oserror("cannot write the device's log", error, where=str(paths.log)) from error


def log_hint(paths: DevicePaths, *, stays: bool) -> str:
    """Says where to read more after an error, as a sentence; "" where nothing is left to read.

    Args:
        paths: of the device.
        stays: the log outlives the run directory's owner. Otherwise the hint has its last lines,
            because the log is deleted together with the run directory.
    """
    if not paths.run.exists():
        return ""
    if not paths.log.exists():  # it runs in the foreground
        return (
            "Its messages are in the terminal that it was started in, or in the journal: "
            f"journalctl -u infiniswap-device@{paths.name}."
        )
    if stays:
        return f"See {paths.log}."
    lines = log_tail(paths.log)
    return f"Its log ends: {lines}" if lines else "Its log is empty; dmesg may say more."


def clear(paths: DevicePaths) -> None:
    """Removes the run directory of a device that has ended; what cannot be removed stays."""
    sockets = [paths.socket, paths.member_socket, paths.far_socket, paths.nbd_socket]
    records = [paths.record, temporary_of(paths.record)]  # it may have died while it wrote it
    files = [*records, *sockets, paths.state, paths.log, paths.lock]
    with contextlib.suppress(OSError):
        files += [] if paths.runs.is_symlink() else list(paths.runs.iterdir())
    for path in files:
        path.unlink(missing_ok=True)
    for directory in (paths.runs, paths.mount, paths.run):
        try:
            directory.rmdir()
        except OSError:
            continue


def remove_link(name: str) -> None:
    """Removes a device's link in LINK_DIR, and that directory after the last one."""
    with contextlib.suppress(OSError):
        (LINK_DIR / name).unlink(missing_ok=True)
        LINK_DIR.rmdir()
