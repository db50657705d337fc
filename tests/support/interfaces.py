# SPDX-License-Identifier: Apache-2.0
"""The versions of what processes of different releases say or leave to each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Of one tree, in the order of the table in docs/versions.md.

    Attributes:
        control: of the control API: those that it speaks.
        announcement: of what daemons announce on an MQTT broker.
        donor: of a daemon's records and of the names of its slabs.
        state: of the layout of a device's state file.
        tables: of the page tables of a stopped device: those that it reads.
    """

    control: frozenset[int]
    announcement: frozenset[int]
    donor: frozenset[int]
    state: frozenset[int]
    tables: frozenset[int]


_PLACES = {
    "control": ("infiniswap/control/messages.py", r"^VERSIONS: Final = \(([\d, ]+)\)"),
    "announcement": ("infiniswap/discovery/announcement.py", r"^SCHEMA: Final = (\d+)$"),
    "donor": ("infiniswap/donor/records.py", r"^FORMAT = (\d+)$"),
    "state": ("csrc/engine/state/arena.c", r"^#define ARENA_VERSION (\d+)u$"),
    "tables": ("csrc/engine/state/tables.c", r"^#define \w+_VERSION (\d+)u$"),
}


def interfaces(tree: Path) -> Interfaces:
    """Read from its sources, so that none of its code is run."""
    found = {}
    for name, (path, pattern) in _PLACES.items():
        text = (tree / path).read_text(encoding="utf-8")
        numbers = " ".join(re.findall(pattern, text, re.MULTILINE))
        found[name] = frozenset(map(int, re.findall(r"\d+", numbers)))
        assert found[name], f"{tree / path} has nothing like {pattern}"
    return Interfaces(**found)
