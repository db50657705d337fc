# SPDX-License-Identifier: Apache-2.0
"""Root runs no code that others can write.

Whoever can change a file of this installation is root as soon as root runs it. So every command of
root first checks the package, the interpreter, the directories that modules come from, and every
directory that leads there. This shows a dangerous installation before somebody uses it. It cannot
help where somebody already has, as changed code could leave the check out.

A developer runs a checkout with sudo. Its owner is the user who called sudo and so is root already:
what belongs to that user counts as root's. INFINISWAP_CODE_OWNER says the same by a user's number,
where root is no user's sudo: in a container or virtual machine that has the checkout from outside.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from infiniswap.errors import ConfigError, NotPermittedError

INSTALL_DIR: Final = "/opt/infiniswap"
"""Where the manual puts an installation."""

CODE_OWNER: Final = "INFINISWAP_CODE_OWNER"

FAR_VARIABLE: Final = "INFINISWAP_FAR"
"""By it the programs of a job find far memory (csrc/far/start.c). Commands of ours drop it at once,
so they have no agent where a job starts one."""


def trusted_users(environ: Mapping[str, str]) -> set[int]:
    """Numbers of the users whose code root may run: root, who called sudo, and CODE_OWNER."""
    named = (environ.get("SUDO_UID", ""), environ.get(CODE_OWNER, ""))
    return {0, *(int(text) for text in named if text.isdecimal())}


def code_paths() -> tuple[Path, ...]:
    """Files that the code of this process comes from, and directories where it is looked for."""
    package = Path(__file__).parent
    found = [package, Path(sys.executable), Path(sys.prefix), Path(os.__file__).parent]
    found += [Path(entry) for entry in sys.path if entry]
    real = [Path(os.path.realpath(path)) for path in found]
    return tuple(path for path in dict.fromkeys((*found, *real)) if path.exists())


def _all_paths() -> Iterator[tuple[Path, bool]]:
    """Those, everything in the package, and the directories that lead there, which no module is
    looked for in. Libraries of others are looked at as far as the directories that they are in: an
    installer makes all files of one alike."""
    found = code_paths()
    yield from ((path, False) for path in found)
    package = Path(__file__).parent
    for top in (package, package.with_name(f"{package.name}.libs")):  # a wheel's C libraries
        for where, names, files in os.walk(top):
            yield from ((Path(where, name), False) for name in ("", *names, *files))
    yield from ((parent, True) for path in found for parent in path.absolute().parents)


def check_own_code(trusted: set[int], *, for_unit: bool = False) -> None:
    """Refuses code that users other than these can change.

    Args:
        trusted: numbers of users.
        for_unit: systemd will run it, where nobody has called sudo.

    Raises:
        NotPermittedError: such code.
    """
    seen: set[Path] = set()
    for path, is_way in _all_paths():
        if path in seen:
            continue
        seen.add(path)
        if why := writable_by(path, trusted, is_way=is_way):
            mend = f"Install Infiniswap as root, for example in {INSTALL_DIR}."
            if not for_unit:
                mend += (
                    " A checkout of your own runs with sudo, or with its owner's number in "
                    f"{CODE_OWNER}."
                )
            raise NotPermittedError(
                f"root would run code that others can change: {why}", where=str(path), mend=mend
            )


def writable_by(path: Path, trusted: set[int], *, is_way: bool = False) -> str:
    """Who can change a file, or what is in a directory, beside these users; "" nobody.

    Args:
        path: of it.
        trusted: numbers of users.
        is_way: it is a directory that only leads to code. If it is sticky (/tmp), nobody but the
            owner of an entry, which is looked at, may replace that.
    """
    try:
        status = path.lstat()
    except OSError:
        return ""  # gone meanwhile
    if status.st_uid not in trusted:
        return f"it belongs to {_user(status.st_uid)}"
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        return ""  # its directory says who may replace it
    if is_way and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return f"every user may write to it (mode {stat.S_IMODE(mode):04o})"
    if mode & stat.S_IWGRP and (others := _members(status.st_gid, trusted)):
        return f"members of its group may write to it: {', '.join(others)}"
    return ""


def changeable_by(path: Path, trusted: set[int]) -> str:
    """Who can change a file or a directory that leads to it, beside these users; "" nobody.

    Args:
        path: absolute.
        trusted: numbers of users.
    """
    real = path.resolve()
    for place in dict.fromkeys((path, *path.parents, real, *real.parents)):
        if why := writable_by(place, trusted, is_way=place not in (path, real)):
            return why if place == path else f"{place}: {why}"
    return ""


def check_program(path: Path, where: str) -> None:
    """Refuses a program that others than root and this process's user can change.

    Args:
        path: absolute.
        where: the key that names it.

    Raises:
        ConfigError: others can.
    """
    if why := changeable_by(path, {os.geteuid()} | trusted_users(os.environ)):
        raise ConfigError(
            f"others can change the program {path}: {why}",
            where=where,
            mend="Let it and the directories that lead to it belong to root, writable by root "
            "alone.",
        )


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _members(gid: int, trusted: set[int]) -> list[str]:
    """Users in a group, beside these. Where it has a name, a few."""
    names = [entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid]
    with contextlib.suppress(KeyError):
        names += grp.getgrgid(gid).gr_mem
    found = []
    for name in dict.fromkeys(names):
        try:
            if pwd.getpwnam(name).pw_uid not in trusted:
                found.append(name)
        except KeyError:
            continue
    return found[:3]
