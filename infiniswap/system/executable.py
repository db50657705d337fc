# SPDX-License-Identifier: Apache-2.0
"""Whether a program can have a library of ours preloaded, by what its file says.

This says what can be known before a program starts: a program may start others, which the loader
judges again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
from collections.abc import Sequence
from typing import BinaryIO, Final

_SCRIPTS_MAX: Final = 5
"""The kernel follows no more `#!` lines than this."""

_LINE_BYTES_MAX: Final = 256

_TABLE_BYTES_MAX: Final = 1 << 26
"""A table of a program's header that is larger is damaged."""

_ELF_64_LITTLE: Final = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_STRINGS, _STRINGS_BYTES = 5, 10
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_PAIR: Final = struct.Struct("<qQ")
_LOADERS_OF_GLIBC: Final = ("ld-linux", "ld64.so.")
_SANITIZERS: Final = {
    b"\0__asan_init\0": "AddressSanitizer",
    b"\0__hwasan_init\0": "HWAddressSanitizer",
    b"\0__tsan_init\0": "ThreadSanitizer",
    b"\0__msan_init\0": "MemorySanitizer",
    b"\0__lsan_init\0": "LeakSanitizer",
}


def why_not_preloaded(command: Sequence[str], path: str, uid: int) -> str:
    """Why the program that a command starts would run without a preloaded library, as the end of a
    sentence ("it is statically linked"); empty: nothing speaks against it, or the file cannot be
    read.

    Args:
        command: the program and its arguments.
        path: of the environment in which it starts.
        uid: whom it runs as.
    """
    words = list(command)
    with contextlib.suppress(OSError):
        for _ in range(_SCRIPTS_MAX):
            found = shutil.which(words[0], path=path)
            if found is None:
                return ""
            with os.fdopen(
                os.open(found, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb"
            ) as file:
                line = file.read(_LINE_BYTES_MAX).partition(b"\n")[0]
                if not line.startswith(b"#!"):
                    return _why_not(file, uid)
            words = os.fsdecode(line[2:]).split() or [""]
            if os.path.basename(words[0]) == "env":
                words = [word for word in words[1:] if not word.startswith("-")] or words
    return ""


def _why_not(file: BinaryIO, uid: int) -> str:
    file.seek(0)
    head = file.read(64)
    if not head.startswith(b"\x7fELF"):
        return ""
    if not head.startswith(_ELF_64_LITTLE) or len(head) < 64:
        return "it is no 64-bit program"
    with open("/proc/self/exe", "rb") as own:
        if head[18:20] != own.read(20)[18:20]:
            return "it is for another processor"
    if _changes_rights(file, uid):
        return "it runs with rights of its own (setuid, setgid or capabilities)"
    segments = _segments(file, head)
    loader = next((_bytes(file, s[2], s[5]) for s in segments if s[0] == _INTERPRETER), b"")
    if not loader:
        return "it is statically linked"
    name = os.path.basename(os.fsdecode(loader.rstrip(b"\0")))
    if not name.startswith(_LOADERS_OF_GLIBC):
        return f"its C library is not glibc (its loader is {name})"
    strings = b"\0" + _strings(file, segments) + b"\0"
    sanitizer = next((which for mark, which in _SANITIZERS.items() if mark in strings), "")
    return f"it is built with {sanitizer}" if sanitizer else ""


def _changes_rights(file: BinaryIO, uid: int) -> bool:
    """Whether the loader will ignore LD_PRELOAD since the program changes its user or rights."""
    found = os.fstat(file.fileno())
    if found.st_mode & stat.S_ISUID and found.st_uid != uid:
        return True
    if found.st_mode & stat.S_ISGID and found.st_mode & stat.S_IXGRP and uid != 0:
        return True
    with contextlib.suppress(OSError):
        return uid != 0 and bool(os.getxattr(file.fileno(), "security.capability"))
    return False


def _bytes(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(min(size, _TABLE_BYTES_MAX))


def _segments(file: BinaryIO, head: bytes) -> list[tuple[int, ...]]:
    """(type, flags, offset, address, _, bytes, _, _) of each."""
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    if size != _SEGMENT.size:
        return []
    table = _bytes(file, offset, size * count)
    return list(_SEGMENT.iter_unpack(table[: len(table) // size * size]))


def _strings(file: BinaryIO, segments: Sequence[tuple[int, ...]]) -> bytes:
    """The names that the program exports or takes from libraries, and those of the libraries."""
    dynamic = next((_bytes(file, s[2], s[5]) for s in segments if s[0] == _DYNAMIC), b"")
    values = dict(_PAIR.iter_unpack(dynamic[: len(dynamic) // _PAIR.size * _PAIR.size]))
    address = values.get(_STRINGS, 0)
    for kind, _, offset, start, _, size, *_ in segments:
        if kind == _LOAD and start <= address < start + size:
            return _bytes(file, offset + address - start, values.get(_STRINGS_BYTES, 0))
    return b""
