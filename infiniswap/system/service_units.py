# SPDX-License-Identifier: Apache-2.0
"""The unit files of infiniswap/system/units/: filled in, written, compared and removed.

Everything takes the root directory that it works in, so that the same code serves the running
host, an image that is being built, and tests.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

from infiniswap import rights
from infiniswap.directories import make_directory
from infiniswap.errors import ConflictError, InfiniswapError, UsageError, from_oserror
from infiniswap.rights import DONOR_USER, device_capabilities
from infiniswap.system.bounded import within
from infiniswap.system.files import PROC, try_read_text
from infiniswap.system.job_cgroup import systemd_makes_them
from infiniswap.system.memory import memory_hierarchy

_Result = TypeVar("_Result")

DAEMON_UNIT: Final = "infiniswapd.service"
DEVICE_UNIT: Final = "infiniswap-device@.service"
UNITS: Final = (DAEMON_UNIT, DEVICE_UNIT)

UNIT_DIR: Final = Path("etc/systemd/system")
"""Below the root. Where packages put theirs (/usr/lib/systemd/system) is not ours to write to."""

PACKAGE_UNIT_DIR: Final = Path("usr/lib/systemd/system")
"""Below the root: the units of the Debian package (tools/deb_package). Those above come first."""

OPTIONS_DIR: Final = Path("/etc/infiniswap/devices")
"""Where each device's unit looks for NAME.env."""

COPIES_DIR: Final = Path("run/infiniswapd/copies")
"""Below the root: where the daemon's unit has copies of secrets, see infiniswap.donor.copies."""

MARK: Final = "Written by `infiniswap service install`, removed by `infiniswap service uninstall`."


def device_unit(name: str) -> str:
    """The unit of one device. Names that devices may have need no escaping there."""
    return DEVICE_UNIT.replace("@.", f"@{name}.")


def quote(word: str) -> str:
    """One word of a command line in a unit file, whatever is in it.

    Raises:
        UsageError: it holds characters that have no place in a path.
    """
    if not word.isprintable():
        raise UsageError(f"{word!r} cannot stand in a unit file")
    text = word.replace("%", "%%").replace("$", "$$")
    if text and not set(text) & set(" \t'\"\\;#"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def has_cgroup_kill(*, proc: Path = PROC) -> bool:
    """Whether this host can end all processes of a job's cgroup without signalling each one."""
    release = re.match(r"(\d+)\.(\d+)", try_read_text(proc / "sys/kernel/osrelease") or "")
    is_new = release is not None and (int(release[1]), int(release[2])) >= (5, 14)
    with contextlib.suppress(InfiniswapError):
        return is_new and memory_hierarchy(proc=proc).version == 2
    return False


def capabilities_here() -> tuple[str, ...]:
    """What a device takes on this host."""
    return device_capabilities(cgroup_kill=has_cgroup_kill(), systemd_cgroups=systemd_makes_them())


def capabilities_by_hand() -> tuple[str, ...]:
    """What the processes of a device may have that systemd does not run. Limits stand for the rest
    (surroundings.limits), and only CAP_SYS_RESOURCE may raise those."""
    keep = capabilities_here()
    if rights.has("CAP_SYS_RESOURCE"):
        return keep
    return (*keep, "CAP_IPC_LOCK", "CAP_SYS_NICE")


def as_device(work: Callable[[], _Result]) -> _Result:
    """Does something with the rights of a device's process, which has fewer than root.

    Raises:
        NotPermittedError, SystemCallError: see bounded.within.
        Others: of `work`.
    """
    return within(capabilities_by_hand(), work)


def capabilities_of_unit(root: Path = Path("/")) -> frozenset[str] | None:
    """What the installed unit of devices leaves them, drop-ins included; None: it is not installed,
    or lists what it takes away."""
    unit = unit_path(root, DEVICE_UNIT) or root / UNIT_DIR / DEVICE_UNIT
    drop_ins = (root / UNIT_DIR / f"{DEVICE_UNIT}.d").glob("*.conf")
    found: set[str] = set()
    for path in (unit, *sorted(drop_ins)):
        for line in (try_read_text(path) or "").splitlines():
            key, _, names = line.partition("=")
            if key.strip() == "CapabilityBoundingSet":
                # An empty line forgets the lines before it.
                found = found | set(names.split()) if names.strip() else set()
    return frozenset(found) if found and not any(name[0] == "~" for name in found) else None


def unit_path(root: Path, name: str) -> Path | None:
    """The unit that systemd would take: of `install`, or else of the package."""
    for directory in (UNIT_DIR, PACKAGE_UNIT_DIR):
        if (path := root / directory / name).exists():
            return path
    return None


def render(
    name: str,
    command: Sequence[str],
    *,
    capabilities: Sequence[str] | None = None,
    mark: str = MARK,
) -> str:
    """The text of a unit.

    Args:
        name: one of UNITS.
        command: what runs `infiniswap` here, absolute.
        capabilities: of a device; None: what one takes on this host.
        mark: its first line.

    Raises:
        UsageError: see quote.
    """
    source = resources.files("infiniswap.system") / "units" / name
    text = source.read_text(encoding="utf-8")
    if capabilities is None:
        capabilities = capabilities_here()
    # A path that has to be quoted is no problem as an argument, only as the first word.
    words = command if quote(command[0]) == command[0] else ("/usr/bin/env", *command)
    for word, meant in (
        ("@MARK@", mark),
        ("@INFINISWAP@", " ".join(map(quote, words))),
        ("@DONOR_USER@", DONOR_USER),
        ("@DEVICE_CAPABILITIES@", " ".join(capabilities)),
    ):
        text = text.replace(word, meant)
    return text


@dataclass(frozen=True, slots=True)
class UnitFile:
    """One file to be installed.

    Attributes:
        path: where.
        text: what.
        state: "new", "changed" (an earlier one of ours is there) or "unchanged".
    """

    path: Path
    text: str
    state: str


def plan(root: Path, command: Sequence[str]) -> tuple[UnitFile, ...]:
    """What an installation would write.

    Raises:
        ConflictError: a file of that name is there, and not ours.
        UsageError: see quote.
    """
    found = []
    for name in UNITS:
        path, text = root / UNIT_DIR / name, render(name, command)
        if not os.path.lexists(path):
            state = "new"
        elif _is_ours(path):
            state = "unchanged" if try_read_text(path) == text else "changed"
        else:
            raise ConflictError(
                "there is a unit of this name that `infiniswap service install` has not written",
                where=str(path),
                mend="Move it away. What you want to be different belongs into a drop-in: "
                f"systemctl edit {name}.",
            )
        found.append(UnitFile(path, text, state))
    return tuple(found)


def _is_ours(path: Path) -> bool:
    return not path.is_symlink() and MARK in (try_read_text(path) or "")


def write(files: Sequence[UnitFile]) -> None:
    """Writes what is not there yet; each file is whole or not there.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    for file in files:
        if file.state == "unchanged":
            continue
        temporary = file.path.with_name(f".{file.path.name}.new")
        try:
            make_directory(file.path.parent, 0o755)
            temporary.write_text(file.text, encoding="utf-8")
            temporary.chmod(0o644)
            temporary.replace(file.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise from_oserror("cannot write the unit", error, where=str(file.path)) from error


def installed(root: Path) -> tuple[Path, ...]:
    """Everything of ours below the root: units, and the links that enable them.

    Drop-ins are their author's; they are named by `drop_ins`.
    """
    directory = root / UNIT_DIR
    units = [path for name in UNITS if _is_ours(path := directory / name)]
    return (*enabling_links(root), *units)


def enabling_links(root: Path) -> tuple[Path, ...]:
    """Links that start a unit of ours at boot."""
    directory = root / UNIT_DIR
    found = []
    for pattern in ("*.wants/*", "*.requires/*"):
        for path in sorted(directory.glob(pattern)):
            if path.is_symlink() and _is_unit_name(path.name):
                found.append(path)
    return tuple(found)


def _is_unit_name(name: str) -> bool:
    head, _, tail = DEVICE_UNIT.partition("@")
    return name == DAEMON_UNIT or (name.startswith(f"{head}@") and name.endswith(tail))


def drop_ins(root: Path) -> Iterator[Path]:
    """Directories with an administrator's changes to units of ours."""
    for path in sorted((root / UNIT_DIR).glob("infiniswap*.service.d")):
        if _is_unit_name(path.name.removesuffix(".d")):
            yield path


def remove(paths: Sequence[Path]) -> None:
    """Removes files and links, and directories of links that are empty then.

    Raises:
        NotPermittedError, SystemCallError: it cannot be removed.
    """
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror("cannot remove the unit", error, where=str(path)) from error
        if path.parent.suffix in (".wants", ".requires"):
            with contextlib.suppress(OSError):
                path.parent.rmdir()
