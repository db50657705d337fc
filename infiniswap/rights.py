# SPDX-License-Identifier: Apache-2.0
"""Whether this process has root's rights, and what to do about the one that it lacks.

Being root is not enough: containers and units take capabilities away, and the root of a user
namespace has all of them there, and none where the kernel asks for those of the host.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")

CAPABILITIES: Final = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_BIND_SERVICE": 10,
    "CAP_NET_ADMIN": 12,
    "CAP_IPC_LOCK": 14,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_NICE": 23,
    "CAP_SYS_RESOURCE": 24,
}
"""Their bits, see linux/capability.h."""

_DEVICE_CAPABILITIES: Final = (
    "CAP_SYS_ADMIN",
    "CAP_SYS_RESOURCE",
    "CAP_DAC_READ_SEARCH",
    "CAP_SYS_PTRACE",
)

DONOR_USER: Final = "infiniswap-donor"
"""The user of the service infiniswapd, made by `infiniswap service install`."""

_HOST_ROOT = "root of the host"
_WHOLE_HOST = ["0", "0", "4294967295"]
_WAYS = "(docker: --cap-add; systemd: CapabilityBoundingSet=)"


def device_capabilities(*, cgroup_kill: bool, systemd_cgroups: bool) -> tuple[str, ...]:
    """What the processes of a device may have, with systemd and without. docs/security.md,
    "Rights", says what for.

    Args:
        cgroup_kill: the kernel ends the processes of a cgroup itself.
        systemd_cgroups: systemd makes and removes the cgroups of jobs.
    """
    return (
        *_DEVICE_CAPABILITIES,
        *(() if cgroup_kill else ("CAP_KILL",)),
        # The kernel lets nobody write to the top of a hierarchy by its mode, 0555.
        *(() if systemd_cgroups else ("CAP_DAC_OVERRIDE",)),
    )


def has(capability: str, *, proc: Path = PROC) -> bool:
    """Whether the capability is in force for this process."""
    effective = _status("CapEff:", proc)
    return bool(effective) and bool(int(effective[0], 16) >> CAPABILITIES[capability] & 1)


def lacking(capability: str, *, proc: Path = PROC) -> str:
    """What this process lacks to use a capability on this host, "" nothing."""
    users = _status("Uid:", proc)
    if len(users) < 2:
        return ""  # no /proc, so nothing to go by
    if users[1] != "0":
        return "root"
    if not has(capability, proc=proc):
        return f"the capability {capability}"
    uid_map = _read(proc / "self/uid_map").split()
    return _HOST_ROOT if uid_map and uid_map != _WHOLE_HOST else ""


def mend(capability: str, *, proc: Path = PROC) -> str:
    """The remedy after a refusal, one sentence, which names what this process lacks."""
    found = hint(capability, proc=proc)
    return found or "Root is refused it, too: dmesg may say which rule of the host is in the way."


def hint(capability: str, *, proc: Path = PROC) -> str:
    """As mend, for a failure that may have another reason: "" where nothing is lacking."""
    what = lacking(capability, proc=proc)
    if what == "root":
        return "Run it as root."
    if what.endswith(capability):
        return f"Add {what}, which this process of root lacks, where it is started {_WAYS}."
    return f"{way_to(what)}." if what else ""


def way_to(what: str) -> str:
    """How to get what `lacking` has named, a sentence without its full stop."""
    if what == "root":
        return "Run it with sudo"
    if what == _HOST_ROOT:
        return "This process is root of a user namespace only: run it outside of that"
    return f"Add it where this process is started {_WAYS}"


def user_number(name: str) -> int | None:
    """The number of a user; None where this host has no such user."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def closed_directory(path: Path) -> Path | None:
    """The first directory on the way to this one, or itself, that this process may not enter."""
    for directory in (*reversed(path.absolute().parents), path.absolute()):
        if os.path.isdir(directory) and not os.access(directory, os.X_OK, effective_ids=True):
            return directory
    return None


def refused_reading(path: Path, noun: str, *, proc: Path = PROC) -> tuple[str, str]:
    """What to say of a file that this process may not read, and the remedy.

    Args:
        path: of the file.
        noun: what it is, with its article.
        proc: root of the proc file system.
    """
    what = f"this user may not read {noun}"
    if (closed := closed_directory(path.parent)) is not None:
        what += f": the directory {closed} is closed to it"
    found = mend("CAP_DAC_OVERRIDE", proc=proc)
    return what, "Run it with sudo." if found == "Run it as root." else found


def _status(key: str, proc: Path) -> list[str]:
    for line in _read(proc / "self/status").splitlines():
        if line.startswith(key):
            return line.split()[1:]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
