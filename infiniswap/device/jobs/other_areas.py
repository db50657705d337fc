# SPDX-License-Identifier: Apache-2.0
"""Swap areas of the host that are not the run's own. The kernel has no private ones: pages of a
job may go to each of them, and not every one keeps them sealed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infiniswap.device.cleanup import leftovers
from infiniswap.device.spec import rundir
from infiniswap.errors import InfiniswapError
from infiniswap.system import block
from infiniswap.system.swap import SwapArea
from infiniswap.units import format_size_short


@dataclass(frozen=True, slots=True)
class OtherArea:
    """Another swap area of the host that got pages of the job.

    Attributes:
        path: of its block device or file.
        bytes_max: at most this much went there.
        sealed: whether it keeps them sealed or encrypted; None: not known.
    """

    path: str
    bytes_max: int
    sealed: bool | None


def sealed_by_path(areas: Iterable[SwapArea], run_dir: Path) -> dict[str, bool]:
    """Whether each area keeps its pages sealed (a device of ours) or encrypted (dm-crypt). Without
    those of which this process may not know it."""
    found = {}
    areas = tuple(areas)
    with contextlib.suppress(InfiniswapError):
        owners = leftovers.owners_of_areas(areas, run_dir)
        for area in areas:
            with contextlib.suppress(InfiniswapError, OSError):
                owner = owners.get(area)
                if owner is None:
                    if (encrypted := block.is_encrypted(Path(area.path))) is not None:
                        found[area.path] = encrypted
                    continue
                spec = rundir.read_record(rundir.paths_of(owner.name, run_dir, run_dir))
                if spec is not None:
                    found[area.path] = spec.config.device.seal
    return found


def describe(areas: Iterable[SwapArea], path: str, sealed: dict[str, bool]) -> list[str]:
    """A note for each swap area other than the one at `path`."""
    found = tuple(areas)
    own_path = os.path.realpath(path)
    own = next((area for area in found if area.path == own_path), None)
    lines = []
    for area in found:
        if area is own:
            continue
        if own is None or area.priority < own.priority:
            when = "is used when ours is full"
        elif area.priority == own.priority:
            when = "is used in turn with ours"
        else:
            when = "is used before ours"
        how = ", and keeps pages unsealed" if sealed.get(area.path) is False else ""
        lines.append(
            f"note: swap is host-wide; {area.path} (priority {area.priority}, "
            f"{format_size_short(area.size_bytes - area.used_bytes)} free) {when}{how}"
        )
    return lines
