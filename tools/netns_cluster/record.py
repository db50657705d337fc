# SPDX-License-Identifier: Apache-2.0
"""What is known of a cluster: its hosts and their processes, in a file under /run.

Everything that a cluster makes has a name that follows from the cluster's name, so what a killed
command has left behind is found without the file, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from infiniswap.errors import ConflictError, NotFoundError, UsageError, from_oserror
from infiniswap.system.files import try_read_text
from infiniswap.system.process import pidfd_open, pidfd_signal, start_time

STATE_DIR = Path("/run/infiniswap-cluster")
WORK_DIR = Path("/var/tmp")
PREFIX = "iswc-"
DEFAULT_NAME = "local"

_LOCK_S_MAX = 120.0
_NAME = re.compile(r"[a-z0-9]{1,8}", re.ASCII)


class Process(msgspec.Struct, frozen=True):
    """One process for good: a pid can come to mean another one, with its start time it cannot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now; one that is gone already is one that has ended."""
        return cls(pid, start_time(pid) or 0)

    @property
    def state(self) -> str:
        """As /proc has it ("T": stopped); "" when it has ended, also as a zombie."""
        text = try_read_text(Path(f"/proc/{self.pid}/stat")) or ""
        fields = text[text.rfind(")") + 1 :].split()
        if len(fields) < 20 or int(fields[19]) != self.start_ticks or fields[0] in "ZX":
            return ""
        return fields[0]

    def send(self, number: signal.Signals) -> bool:
        """Sends it; False when the process has ended."""
        with contextlib.suppress(NotFoundError):
            pidfd = pidfd_open(self.pid)
            try:
                return bool(self.state) and pidfd_signal(pidfd, number)
            finally:
                os.close(pidfd)
        return False

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        end_s = time.monotonic() + timeout_s
        while self.state:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.02)
        return True


class Host(msgspec.Struct):
    """One host.

    Attributes:
        name: h1, h2, ...
        address: on the bridge.
        memory_bytes: its cgroup's limit.
        pool: most memory lent, as the daemon's option has it.
        link: speed of its cable as `tc` writes it, "" for no limit.
        daemon: its process, None before its first start.
        squeezer: holds `squeeze_bytes`.
        relay: holds packets back for `delay_ms`.
        cut: the cable is.
    """

    name: str
    address: str
    memory_bytes: int
    pool: str = "auto"
    link: str = ""
    daemon: Process | None = None
    squeezer: Process | None = None
    squeeze_bytes: int = 0
    relay: Process | None = None
    delay_ms: float = 0.0
    cut: bool = False


class Record(msgspec.Struct):
    """A cluster.

    Attributes:
        name: its name.
        keeper: the command that takes it down when it ends; None once it stays by itself.
        hosts: all of them.
        slab_bytes: unit of lending.
        headroom: of each daemon, as its option has it.
        settings: more of the configuration, by `section.key`, in TOML.
    """

    name: str
    keeper: Process | None
    hosts: list[Host]
    slab_bytes: int
    headroom: str = "auto"
    settings: dict[str, str] = {}

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            NotFoundError: there is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        names = ", ".join(host.name for host in self.hosts)
        raise NotFoundError(f"the cluster {self.name} has no host {name!r}, it has {names}")


def check_name(name: str) -> str:
    """The name, when it can name a cluster.

    Raises:
        UsageError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a cluster: at most 8 lower-case letters and digits")
    return name


def state_directory(name: str) -> Path:
    """The record, the secret, and a directory per host. In memory."""
    return STATE_DIR / name


def work_directory(name: str) -> Path:
    """Backups of the hosts' devices. On disk."""
    return WORK_DIR / f"{PREFIX}{name}"


def names() -> list[str]:
    """Clusters that have a state directory."""
    if not STATE_DIR.is_dir():
        return []
    return sorted(entry.name for entry in STATE_DIR.iterdir() if entry.is_dir())


def load(name: str) -> Record | None:
    """The record, None without a whole one."""
    text = try_read_text(state_directory(name) / "cluster.json")
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Record)
    except msgspec.DecodeError:
        return None


def save(record: Record) -> None:
    """Writes the record so that there is a whole one or the one before.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    path = state_directory(record.name) / "cluster.json"
    temporary = path.with_suffix(".new")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        temporary.replace(path)
    except OSError as error:
        raise from_oserror("cannot write the cluster's record", error, where=str(path)) from error


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the cluster's lock; the kernel drops it with the process.

    Raises:
        ConflictError: another command works on that cluster for too long.
        NotPermittedError, SystemCallError: the lock file cannot be made.
    """
    path = STATE_DIR / f"{name}.lock"
    lock = _take(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if not state_directory(name).exists():
                path.unlink()
                STATE_DIR.rmdir()
        os.close(lock)


def _take(path: Path) -> int:
    end_s = time.monotonic() + _LOCK_S_MAX
    while True:
        try:
            STATE_DIR.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # its last holder has removed the directory meanwhile
        except OSError as error:
            raise from_oserror("cannot lock", error, where=str(path)) from error
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)
        if time.monotonic() >= end_s:
            raise ConflictError(
                "another command works on this cluster", where=str(path), mend="Wait for its end."
            )
        time.sleep(0.05)
