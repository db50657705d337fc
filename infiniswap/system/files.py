# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the small text files of /proc, /sys and cgroups."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from infiniswap.errors import SystemCallError, from_oserror

PROC = Path("/proc")
SYS = Path("/sys")

_ESCAPE = re.compile(r"\\([0-7]{3})")
_KEY_VALUE = re.compile(r"^[ \t]*(\S+)[ \t]+(-?[0-9]+)[ \t]*$", re.ASCII | re.MULTILINE)
_LOCK_TRIES = 20
_LOCK_RETRY_S = 0.025
_LOG_LINES = 6
_LOG_BYTES = 4096


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
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
            path.parent.mkdir(mode=directory_mode, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if overwrites:
        overwrite(path)
    temporary.replace(path)
    sync_directory(path.parent)


def overwrite(path: Path) -> None:
    """Overwrites a small file with zeros, if there is one, before it is removed: its blocks then
    hold nothing of it when they are free. A file that has another name, too, stays whole. Nothing
    can be done about file systems and disks that write elsewhere."""
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        if status.st_nlink == 1:
            file.write(bytes(status.st_size))
            os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes what was created or removed in a directory survive a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
