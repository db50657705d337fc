# SPDX-License-Identifier: Apache-2.0
"""systemd as this host's service manager: whether it is, and asking it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.system.programs import find, run_command

_RUNNING = Path("run/systemd/system")
_BUS = Path("run/dbus/system_bus_socket")

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


def reload() -> None:
    """Makes it read its unit files again.

    Raises:
        SystemCallError, UnavailableError, DeadlineError: see run_command.
    """
    run_command(["systemctl", "daemon-reload"], mend=rights.hint("CAP_SYS_ADMIN"))


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
