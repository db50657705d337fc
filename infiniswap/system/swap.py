# SPDX-License-Identifier: Apache-2.0
"""Swap areas: which are active, making, adding and removing one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap import rights
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    SystemCallError,
    UnavailableError,
    UsageError,
    from_oserror,
)
from infiniswap.system.files import PROC, is_held, read_text, unescape
from infiniswap.system.memory import (
    CgroupMemory,
    Memory,
    cgroup_memory,
    machine_memory,
    memory_hierarchy,
    parse_meminfo,
)
from infiniswap.system.programs import run_command
from infiniswap.units import MIB, format_size_short

PRIORITY_MAX = 32_767
PRIORITY_DEFAULT = 100
"""Ours where no active area has a higher one: leaves room on both sides."""

LABEL_CHARS_MAX = 15
SWAP_LABEL_PREFIX = "isw-"
"""Labels of swap areas on our devices begin so; the device's name follows."""
SWAPOFF_RESERVE_BYTES = 64 * MIB
"""Kept free beyond what is swapped in, as the host goes on living meanwhile."""

CGROUPS_LOOKED_AT_MAX = 20_000

_LEAVING_S_MAX = 5.0
_PAUSE_S = 0.05

_DELETED = " (deleted)"
_NUMBER = re.compile("-?[0-9]{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SwapArea:
    """An active swap area.

    Attributes:
        path: as the kernel names it; a device or a file.
        kind: "partition" (any block device) or "file".
        deleted: the file or device node has been removed since.
    """

    path: str
    kind: str
    size_bytes: int
    used_bytes: int
    priority: int
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether what is swapped out fits back into memory; `reason` says what is in the way."""

    fits: bool
    reason: str = ""


def parse_swaps(text: str) -> tuple[SwapArea, ...]:
    """Areas from /proc/swaps; lines that are not of its form are left out."""
    areas: list[SwapArea] = []
    for line in text.split("\n"):
        # The kernel escapes these blanks in the path; what else counts as blank to Python may
        # be part of it.
        fields = re.split("[ \t]+", line.rstrip(" \t"))
        numbers = fields[2:5]
        if len(fields) != 5 or not all(_NUMBER.fullmatch(number) for number in numbers):
            continue
        path = unescape(fields[0])
        deleted = path.endswith(_DELETED)
        size_kib, used_kib, priority = (int(number) for number in numbers)
        areas.append(
            SwapArea(
                path=path.removesuffix(_DELETED),
                kind=fields[1],
                size_bytes=size_kib * 1024,
                used_bytes=used_kib * 1024,
                priority=priority,
                deleted=deleted,
            )
        )
    return tuple(areas)


def active_areas(*, proc: Path = PROC) -> tuple[SwapArea, ...]:
    """Every active swap area of the host.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    return parse_swaps(read_text(proc / "swaps", "cannot read the swap areas"))


def find_area(path: Path, *, proc: Path = PROC) -> SwapArea | None:
    """The active area at `path` (links are followed), None when it is not active."""
    wanted = os.path.realpath(path)
    for area in active_areas(proc=proc):
        if area.path == wanted or (not area.deleted and os.path.realpath(area.path) == wanted):
            return area
    return None


def being_taken_off(*, proc: Path = PROC) -> SwapArea | None:
    """The area that a swapoff under way is emptying, None without one. /proc/swaps still lists it,
    but the host's total counts only the part of it that is in use (mm/swapfile.c: si_swapinfo).

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    areas = active_areas(proc=proc)
    figures = parse_meminfo(read_text(proc / "meminfo", "cannot read the memory figures"))
    if [_identity(area) for area in areas] != [_identity(area) for area in active_areas(proc=proc)]:
        return None  # one has come or gone between the two files
    total_bytes = sum(area.size_bytes for area in areas)
    missing_bytes = total_bytes - figures.get("SwapTotal", total_bytes)
    if missing_bytes <= 0:
        return None
    return min(
        areas, key=lambda area: abs(area.size_bytes - area.used_bytes - missing_bytes), default=None
    )


def _identity(area: SwapArea) -> tuple[str, int, int]:
    return area.path, area.size_bytes, area.priority


def priority_above(areas: Iterable[SwapArea], *, path: Path | None = None) -> int:
    """A priority above that of every area but the one at `path`.

    Raises:
        ConflictError: one of them has the highest there is.
    """
    own = None if path is None else os.path.realpath(path)
    others = [area for area in areas if area.path != own]
    top = max(others, key=lambda area: area.priority, default=None)
    if top is None:
        return PRIORITY_DEFAULT
    if top.priority >= PRIORITY_MAX:
        raise ConflictError(
            f"its priority is {top.priority}, the highest there is, so the kernel would fill it "
            "before any other swap area",
            where=top.path,
            mend=f"Give it a lower one: swapoff {top.path} && swapon -p 10 {top.path}.",
        )
    return max(PRIORITY_DEFAULT, top.priority + 1)


def mkswap(path: Path, *, label: str, timeout_s: float = 60.0) -> None:
    """Writes a swap header on a block device or file.

    Raises:
        UsageError: the label is longer than LABEL_CHARS_MAX bytes.
        SystemCallError, UnavailableError, DeadlineError: see run_command.
    """
    if not 0 < len(label.encode()) <= LABEL_CHARS_MAX:
        raise UsageError(f"{label!r} cannot label a swap area: 1 to {LABEL_CHARS_MAX} bytes")
    run_command(["mkswap", "--label", label, str(path)], timeout_s=timeout_s)


def swapon(
    path: Path, *, priority: int, discard: bool, timeout_s: float = 60.0, proc: Path = PROC
) -> None:
    """Adds the area, in a child process.

    Args:
        path: block device or file with a swap header.
        priority: 0..PRIORITY_MAX, see priority_above.
        discard: tell the device which pages are free again, so that donors do not keep dead ones.
        timeout_s: seconds.
        proc: root of the proc file system.

    Raises:
        UsageError: no such priority.
        ConflictError: it is active already.
        SystemCallError, UnavailableError, DeadlineError: see run_command.
    """
    if not 0 <= priority <= PRIORITY_MAX:
        raise UsageError(f"{priority} is not a swap priority: 0 to {PRIORITY_MAX}")
    area = find_area(path, proc=proc)
    if area is not None:
        raise ConflictError(
            f"it is an active swap area already, with priority {area.priority}", where=str(path)
        )
    argv = ["swapon", "--priority", str(priority)]
    if discard:
        argv.append("--discard")
    run_command([*argv, str(path)], timeout_s=timeout_s, mend=rights.hint("CAP_SYS_ADMIN"))


def swapoff(path: Path, *, timeout_s: float, proc: Path = PROC) -> None:
    """Removes the area, in a child process: it reads every page back in, which the process that
    serves those pages must not wait for itself. Nothing to do when it is not active. While somebody
    else's swapoff empties it, the kernel refuses a second one: then it waits for that one.

    Killing the child on time-out is safe: the kernel then keeps the area as it was.

    Raises:
        DeadlineError: not done in time; the area is still active.
        SystemCallError: refused, most likely for lack of memory.
    """
    end_s = time.monotonic() + timeout_s
    if find_area(path, proc=proc) is None:
        return
    try:
        run_command(["swapoff", str(path)], timeout_s=timeout_s)
    except (DeadlineError, SystemCallError) as error:
        if _wait_for_another(path, end_s, proc):
            swapoff(path, timeout_s=max(_PAUSE_S, end_s - time.monotonic()), proc=proc)
            return
        area = find_area(path, proc=proc)
        if area is None:
            return
        left = f"it is still an active swap area with {format_size_short(area.used_bytes)} in use"
        mend = "End the processes whose memory is there, or free memory, and try again."
        if isinstance(error, DeadlineError):
            raise DeadlineError(
                f"swapoff did not end within {timeout_s:g} s: {left}", where=str(path), mend=mend
            ) from error
        raise SystemCallError(f"{error.what}; {left}", where=str(path), mend=mend) from error


def _wait_for_another(path: Path, end_s: float, proc: Path) -> bool:
    """Whether somebody else's swapoff was emptying the area; returns when that has ended."""
    found = False
    while time.monotonic() < end_s:
        area, leaving = find_area(path, proc=proc), being_taken_off(proc=proc)
        if area is None or leaving is None or leaving.path != area.path:
            return found
        found = True
        time.sleep(_PAUSE_S)
    return False


def used_bytes(path: Path, *, proc: Path = PROC) -> int:
    """Bytes swapped out to the area, 0 when it is not active."""
    area = find_area(path, proc=proc)
    return 0 if area is None else area.used_bytes


@contextlib.contextmanager
def leaving(path: Path) -> Iterator[None]:
    """Announces that the area at `path` is about to be removed: until the end nobody else counts
    on its room (swapoff_fits). Two that counted on each other's would find none.

    The kernel takes the announcement back when this process dies.

    Raises:
        ConflictError: something else keeps the device locked.
        SystemCallError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise from_oserror("cannot open the swap area", error, where=str(path)) from error
    try:
        end_s = time.monotonic() + _LEAVING_S_MAX
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:  # somebody looks at it: udev, or another one that leaves
                if time.monotonic() >= end_s:
                    raise ConflictError(
                        "another program keeps the swap area locked",
                        where=str(path),
                        mend=f"See who does with `lslocks` or `fuser {path}`.",
                    ) from error
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def _is_leaving(area: SwapArea) -> bool:
    return is_held(Path(area.path)) is True


# ---------------------------------------------------------- does swapoff fit in memory


def judge_swapoff(
    area_used_bytes: int,
    memory: Memory,
    cgroups: Iterable[tuple[str, CgroupMemory]],
    elsewhere_bytes: int = 0,
) -> Fit:
    """Whether `area_used_bytes` can be read back in.

    A page read back is charged to the cgroup that owns it, whoever asked for it; so each limited
    cgroup must have room for all that it has in swap (which of it lies in this area the kernel
    does not tell), and the host for the whole. Where other swap areas have room for all of it
    (`elsewhere_bytes`), the kernel makes that room.
    """
    needed = area_used_bytes + SWAPOFF_RESERVE_BYTES
    if area_used_bytes == 0 or elsewhere_bytes >= needed:
        return Fit(True)
    if memory.available_bytes < needed:
        return Fit(
            False,
            f"{format_size_short(area_used_bytes)} are swapped out and only "
            f"{format_size_short(memory.available_bytes)} of memory are available",
        )
    for name, cgroup in cgroups:
        swapped, room = cgroup.swap_bytes, cgroup.available_bytes
        if not swapped or room is None:
            continue
        if min(swapped, area_used_bytes) > room:
            return Fit(
                False,
                f"the cgroup {name} has {format_size_short(swapped)} swapped out and room for "
                f"only {format_size_short(room)} below its limit",
            )
    return Fit(True)


def _limited_cgroups(proc: Path) -> list[tuple[str, CgroupMemory]]:
    try:
        hierarchy = memory_hierarchy(proc=proc)
    except UnavailableError:
        return []
    found: list[tuple[str, CgroupMemory]] = []
    for count, (directory, _, _) in enumerate(os.walk(hierarchy.mount_point)):
        if count >= CGROUPS_LOOKED_AT_MAX:
            break
        path = Path(directory)
        try:
            cgroup = cgroup_memory(path, hierarchy.version)
        except SystemCallError:  # removed meanwhile
            continue
        if cgroup.limit_bytes is not None:
            name = "/" + str(path.relative_to(hierarchy.mount_point)).removeprefix(".")
            found.append((name, cgroup))
    return found


def swapoff_fits(path: Path, *, proc: Path = PROC) -> Fit:
    """Whether swapoff of the area at `path` would fit, by judge_swapoff, on this host now.

    Raises:
        NotPermittedError, SystemCallError: figures could not be read.
    """
    area_used_bytes = used_bytes(path, proc=proc)
    if area_used_bytes == 0:
        return Fit(True)
    own = find_area(path, proc=proc)
    # By its path: what is used changes between two looks.
    elsewhere_bytes = sum(
        area.size_bytes - area.used_bytes
        for area in active_areas(proc=proc)
        if (own is None or area.path != own.path) and not _is_leaving(area)
    )
    return judge_swapoff(
        area_used_bytes, machine_memory(proc=proc), _limited_cgroups(proc), elsewhere_bytes
    )
