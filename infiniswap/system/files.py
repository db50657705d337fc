# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the small text files of /proc, /sys and cgroups."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from infiniswap import rights
from infiniswap.directories import make_directory
from infiniswap.errors import NotPermittedError, SystemCallError, from_oserror

PROC = Path("/proc")
SYS = Path("/sys")

_ESCAPE = re.compile(r"\\([0-7]{3})")
_KEY_VALUE = re.compile(r"^[ \t]*(\S+)[ \t]+(-?[0-9]+)[ \t]*$", re.ASCII | re.MULTILINE)
_LOCK_TRIES = 20
_LOCK_RETRY_S = 0.025
_LOG_LINES = 6
_LOG_BYTES = 4096
_CHANGED_BY_OTHERS = "can be changed by other users"


def _read(path: Path) -> str:
    # Paths in these files can hold any byte but NUL, carriage returns too.
    with path.open("rb", buffering=0) as file:
        return os.fsdecode(file.readall())


def read_text(path: Path, what: str) -> str:
    """The file's text.

    Args:
        path: the file.
        what: what is being done, for the error: "cannot read the memory limit".

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    try:
        return _read(path)
    except OSError as error:
        raise from_oserror(what, error, where=str(path)) from error


def is_held(path: Path) -> bool | None:
    """Whether a process holds an exclusive flock on the file. Does not wait.

    Returns:
        False where there is no such file; None where this user may not look.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return None if isinstance(error, PermissionError) else False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def try_lock(path: Path, directory_mode: int = 0o755) -> int | None:
    """Makes the file, and its directory, and takes an exclusive flock on it. Does not wait for one
    that holds it longer than to look whether it is held.

    Returns:
        A descriptor, which must stay open; None: another process holds it.

    Raises:
        NotPermittedError, SystemCallError: the file cannot be made or locked.
    """
    for left in reversed(range(_LOCK_TRIES)):
        try:
            make_directory(path.parent, directory_mode)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Its last holder removes the directory, too, and may have done so meanwhile.
            if left and isinstance(error, FileNotFoundError | FileExistsError):
                time.sleep(_LOCK_RETRY_S)
                continue
            raise from_oserror("cannot make the lock file", error, where=str(path)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed it: a lock on that file is worth nothing.
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            os.close(lock)
            raise from_oserror("cannot lock", error, where=str(path)) from error
        os.close(lock)
        time.sleep(_LOCK_RETRY_S)
    return None


def try_read_text(path: Path) -> str | None:
    """The file's text, or None when it is absent or cannot be read."""
    try:
        return _read(path)
    except OSError:
        return None


def log_tail(path: Path) -> str:
    """The last lines of a log as one line, for an error message; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(text.strip().splitlines()[-_LOG_LINES:])


def try_read_int(path: Path) -> int | None:
    """The file's one number, or None when it holds something else, is absent or cannot be read."""
    text = (try_read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def read_int(path: Path, what: str) -> int:
    """The file's one number.

    Raises:
        NotPermittedError, SystemCallError: unreadable, or no number.
    """
    text = read_text(path, what)
    try:
        return int(text)
    except ValueError:
        raise SystemCallError(
            f"{what}: {text.strip()!r} is not a number", where=str(path)
        ) from None


def write_text(path: Path, text: str, what: str) -> None:
    """Writes the text in one write to a file that exists.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    try:
        with path.open("w") as file:
            file.write(text)
    except OSError as error:
        raise from_oserror(what, error, where=str(path)) from error


def try_write_text(path: Path, text: str) -> bool:
    """As write_text; False instead of an error."""
    try:
        with path.open("w") as file:
            file.write(text)
    except OSError:
        return False
    return True


def unescape(text: str) -> str:
    """Undoes the octal escapes (`\\040`) with which the kernel writes paths in tables."""
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)


def parse_key_values(text: str) -> dict[str, int]:
    """Lines of `name number` (memory.stat, memory.events, ...); other lines are left out."""
    return {name: int(number) for name, number in _KEY_VALUE.findall(text)}


def why_not_own(status: os.stat_result, owner: str = "") -> str:
    """Says, as a predicate, why others than root, this process's user and that owner may decide
    what is in a file or directory; "" when they may not."""
    mode, is_directory = status.st_mode, stat.S_ISDIR(status.st_mode)
    if not (is_directory or stat.S_ISREG(mode)):
        return "is no regular file"
    if status.st_uid not in (0, os.geteuid(), rights.user_number(owner) if owner else None):
        return f"belongs to another user ({status.st_uid})"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{_CHANGED_BY_OTHERS} (mode {stat.S_IMODE(mode):04o})"
    if not is_directory and status.st_nlink != 1:
        return f"has {status.st_nlink} names (hard links)"
    return ""


def check_own_directory(path: Path, key: str, owner: str = "") -> None:
    """Accepts a directory of which nobody but root and this process's user decides what is in it.

    Args:
        path: of the directory, which need not exist.
        key: of the configuration, that says where it is.
        owner: a user who may own it as well.

    Raises:
        NotPermittedError: others decide that; says who.
    """
    try:
        status = path.stat()
    except OSError:
        return
    _check_directory(path, status, key, owner)


def _check_directory(path: Path, status: os.stat_result, key: str, owner: str = "") -> None:
    if why := why_not_own(status, owner):
        mend = f"See whose it is (ls -ld {path}), and remove it or name another {key}."
        if why.startswith(_CHANGED_BY_OTHERS):
            mend = f"Look what others have put there, and then run: chmod go-w {path}."
        raise NotPermittedError(f"the directory {why}", where=str(path), mend=mend)


def read_own_file(path: Path, key: str) -> bytes | None:
    """What is in a file that nobody but root and this process's user can have written. None: there
    is no such file. What is looked at is what is open, so that nobody can replace it meanwhile.

    Args:
        path: of the file.
        key: of the configuration, that says where its directory is.

    Raises:
        NotPermittedError: others can have written it; says who.
        OSError: it cannot be read.
    """
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _check_directory(path.parent, os.fstat(directory), key)
        return _read_own(path, directory)
    finally:
        os.close(directory)


def _read_own(path: Path, directory: int) -> bytes | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    mend = f"See whose it is (ls -l {path}), and remove it."
    try:
        descriptor = os.open(path.name, flags, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = "is a symbolic link"
    else:
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not (why := why_not_own(status)):
                return file.read()
        if why.startswith(_CHANGED_BY_OTHERS):
            mend = f"Read what is in it, and then run: chmod 600 {path}."
    raise NotPermittedError(f"the file {why}", where=str(path), mend=mend)


def temporary_of(path: Path) -> Path:
    """Where `replace_file` writes the new contents first. Who dies meanwhile leaves it there."""
    return path.with_name(f"{path.name}.new")


def replace_file(path: Path, data: bytes, *, overwrites: bool = False) -> None:
    """Puts a file that only this user may read in the place of another one, so that there is always
    a whole one, also after a loss of power.

    Args:
        path: of both.
        data: of the new file.
        overwrites: the old file's blocks are to hold nothing. A loss of power may then leave
            neither.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask is
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if overwrites:
        overwrite(path)
    temporary.replace(path)
    sync_directory(path.parent)


def overwrite(path: Path) -> None:
    """Overwrites a small file with zeros, if there is one, before it is removed: its blocks then
    hold nothing of it when they are free. A file that has another name, too, or is another user's,
    stays whole, and so does what a link leads to. Nothing can be done about file systems and disks
    that write elsewhere."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(os.open(path, flags), "r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not why_not_own(status):
            file.write(bytes(status.st_size))
            os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes what was created or removed in a directory survive a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
