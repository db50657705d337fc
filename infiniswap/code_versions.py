# SPDX-License-Identifier: Apache-2.0
"""Versions of the code side by side, as the Debian package installs them.

Each version is a virtual environment in a directory of its own, with the file MARKER in it; the
link `current` beside them names the one that new commands run. A device keeps the version that it
was started with. Other installations (pip, a checkout) have one directory, which an upgrade
changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import from_oserror
from infiniswap.rights import PROC

MARKER: Final = "debian-package"
"""A file in each version: the version of the package that brought it."""
_CURRENT: Final = "current"
_DPKG_COPY: Final = "package"
"""What dpkg unpacks; a version is made of hard links to it."""


def packaged_in(prefix: str = sys.prefix) -> Path | None:
    """The directory of the versions, if this process runs one of them."""
    version = Path(prefix)
    is_one = (version / MARKER).is_file() and (version.parent / _CURRENT / MARKER).is_file()
    return version.parent if is_one else None


def current_interpreter(prefix: str = sys.prefix) -> str:
    """The interpreter of the version that new commands run; "" where there is one version only."""
    top = packaged_in(prefix)
    if top is None:
        return ""
    # By its own name: the link may lead elsewhere the next time.
    return str((top / _CURRENT).resolve() / "bin" / Path(sys.executable).name)


def versions(top: Path) -> list[Path]:
    """Every version there, without dpkg's copy."""
    with contextlib.suppress(OSError):
        return sorted(
            path
            for path in top.iterdir()
            if path.name[0] != "."
            and path.name not in (_CURRENT, _DPKG_COPY)
            and (path / MARKER).is_file()
        )
    return []


@dataclass(frozen=True, slots=True)
class CodeProcess:
    """A process that runs code of a version.

    Attributes:
        pid: its number.
        words: of its command line.
        version: the directory.
        unit: the systemd unit that it belongs to, "" none.
    """

    pid: int
    words: tuple[str, ...]
    version: Path
    unit: str


def processes(top: Path, *, proc: Path = PROC) -> list[CodeProcess]:
    """Every process that needs a version there, but for this one.

    A holder needs the version that it starts processes from: after a restart of the device that is
    its children's, whatever its own command line says.
    """
    seen = {int(path.name): _look(path) for path in proc.iterdir() if path.name.isdecimal()}
    found = []
    for version in versions(top):
        runs = {
            pid
            for pid, process in seen.items()
            if process.is_of(version) and _is_in_root_of(proc / str(pid), version)
        }
        for pid in sorted(runs - {os.getpid()}):
            children = {child for child, process in seen.items() if process.parent == pid}
            if seen[pid].is_holder and children and not children & runs:
                continue
            unit = seen[pid].unit
            found.append(CodeProcess(pid, tuple(seen[pid].words), version, unit))
    return found


def sweep(top: Path, *, proc: Path = PROC) -> list[CodeProcess]:
    """Removes versions that no process needs, but for the current one.

    Returns:
        Processes because of which an earlier version is kept.

    Raises:
        NotPermittedError, SystemCallError: one cannot be removed.
    """
    current = (top / _CURRENT).resolve()
    earlier = [path for path in versions(top) if path != current]
    if not earlier:
        return []
    kept = [process for process in processes(top, proc=proc) if process.version in earlier]
    for path in set(earlier) - {process.version for process in kept}:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise from_oserror("cannot remove earlier code", error, where=str(path)) from error
    return kept


def _is_in_root_of(process: Path, version: Path) -> bool:
    """Whether the process means the same directory by that name: in a container it is another."""
    try:
        return os.path.samefile(version, f"{process}/root{version}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # it may not be looked at
        return True


@dataclass(frozen=True, slots=True)
class _Seen:
    words: list[str]
    program: str
    parent: int
    unit: str

    @property
    def is_holder(self) -> bool:
        return self.program.removesuffix(" (deleted)").endswith("/infiniswap-holder")

    def is_of(self, version: Path) -> bool:
        return any(word.startswith(f"{version}/") for word in (*self.words, self.program))


def _look(process: Path) -> _Seen:
    """One that has ended meanwhile has no words."""
    words, program, parent, unit = [""], "", 0, ""
    with contextlib.suppress(OSError):
        words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
        program = os.readlink(process / "exe")
        # Behind the name, which may hold anything, come the state and the parent.
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        cgroup = (process / "cgroup").read_text().strip()
        unit = cgroup.rpartition("\n")[2].rpartition("/")[2]
    return _Seen(words, program, parent, unit)
