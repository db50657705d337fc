# SPDX-License-Identifier: Apache-2.0
"""systemd as this host's service manager: whether it is, and asking it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.errors import DeadlineError, InfiniswapError
from infiniswap.system.programs import find, finish, run_command

_RUNNING = Path("run/systemd/system")
_BUS = Path("run/dbus/system_bus_socket")

WAIT_S_MAX: Final = 20.0
"""For one thing that systemd was asked to do."""

_POLL_S = 0.02
_START_UNIT: Final = (
    "busctl",
    "call",
    "org.freedesktop.systemd1",
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1.Manager",
    "StartTransientUnit",
    "ssa(sv)a(sa(sv))",
)

ACTIVE_STATES: Final = frozenset(
    {"active", "activating", "deactivating", "reloading", "maintenance"}
)
"""States of a unit with processes, or soon with some."""


def is_running(root: Path = Path("/")) -> bool:
    """Whether systemd is this host's init, as sd_booted(3) finds out."""
    return (root / _RUNNING).is_dir()


def has_bus(root: Path = Path("/")) -> bool:
    """Whether it can be asked over D-Bus: containers and rescue systems may have no bus."""
    return is_running(root) and (root / _BUS).exists() and find("busctl") is not None


def is_stopping(root: Path = Path("/")) -> bool:
    """Whether it shuts this host down; False if it cannot be asked."""
    if not is_running(root):
        return False
    with contextlib.suppress(InfiniswapError):
        # Exits with an error in most states. As root it needs no bus, which may have ended.
        return finish(["systemctl", "is-system-running"]).stdout.strip() == "stopping"
    return False


def reload() -> None:
    """Makes it read its unit files again.

    Raises:
        SystemCallError, UnavailableError, DeadlineError: see run_command.
    """
    run_command(["systemctl", "daemon-reload"], mend=rights.hint("CAP_SYS_ADMIN"))


def start_unit(name: str, *properties: str) -> None:
    """Asks systemd for a transient unit, which may not have started on return: see wait_until.

    Args:
        name: of the unit.
        properties: each as `NAME TYPE VALUES...` (busctl).

    Raises:
        SystemCallError, UnavailableError, DeadlineError: see run_command.
    """
    words = [word for text in properties for word in text.split()]
    run_command(
        [*_START_UNIT, name, "fail", str(len(properties)), *words, "0"],
        timeout_s=WAIT_S_MAX,
        mend="systemd makes the cgroups of this host; see journalctl -b.",
    )


def wait_until(done: Callable[[], bool], what: str) -> None:
    """Waits for something that systemd was asked to do.

    Raises:
        DeadlineError: it took too long.
    """
    end_s = time.monotonic() + WAIT_S_MAX
    while not done():
        if time.monotonic() >= end_s:
            raise DeadlineError(
                f"systemd has not done it within {WAIT_S_MAX:g} s: {what}",
                mend="See journalctl -b, and systemctl list-jobs.",
            )
        time.sleep(_POLL_S)


def units(*patterns: str) -> dict[str, str]:
    """State by name of the loaded units that match: `active`, `failed`, `inactive`, ...

    Raises:
        SystemCallError, UnavailableError, DeadlineError: see run_command.
    """
    text = run_command(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "--", *patterns]
    )
    return parse_units(text)


def parse_units(text: str) -> dict[str, str]:
    """State by name from the lines of `systemctl list-units --plain --no-legend`."""
    found = {}
    for line in text.splitlines():
        # A mark before the name of units that have failed (`● name ...`) counts as no field.
        fields = line.replace("●", " ").replace("*", " ").split()
        if len(fields) >= 4:
            found[fields[0]] = fields[2]
    return found
