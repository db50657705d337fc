# SPDX-License-Identifier: Apache-2.0
"""What an installation leaves beside its units: settings, devices' contents, run-time directories.

Modules, sysctls, tmpfiles and the like are none of ours: nothing of that kind is ever written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.config import DEFAULT_PATH, Config
from infiniswap.device.rundir import LINK_DIR
from infiniswap.errors import from_oserror


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of ours.

    Attributes:
        path: where.
        what: lies there.
        mend: how to get rid of it in order.
        own: patterns of the files that `--purge` removes.
    """

    path: Path
    what: str
    mend: str
    own: tuple[str, ...] = ()


def places(root: Path, config: Config) -> tuple[Place, ...]:
    """Every directory that daemon, devices and `infiniswap init` make, below the root."""
    purge = "infiniswap service uninstall --purge"
    contents = ("*.device", "*.tables", "*.backup", "*.drain")
    found = [
        Place(
            DEFAULT_PATH.parent,
            "settings, secret and declared devices",
            purge,
            (DEFAULT_PATH.name, "secret", "devices/*.env"),
        ),
        Place(config.device.backup_dir, "contents of stopped devices", purge, contents),
        Place(config.daemon.state_dir, "whether the donor drains", purge, ("*.drain",)),
        Place(
            config.device.run_dir, "devices that run or have died", "infiniswap device remove NAME"
        ),
        Place(LINK_DIR, "links to devices", "infiniswap device remove NAME"),
    ]
    if config.daemon.run_dir is not None:
        mend = "infiniswap daemon --release"
        found.append(Place(config.daemon.run_dir, "memory that is still lent", mend))
    unique = {place.path: place for place in reversed(found)}
    return tuple(
        Place(root / place.path.relative_to("/"), place.what, place.mend, place.own)
        for place in unique.values()
    )


def own_files(place: Place) -> list[Path]:
    """Files there that `--purge` removes."""
    return sorted(path for pattern in place.own for path in place.path.glob(pattern))


def purge(place: Place) -> None:
    """Removes them.

    Raises:
        NotPermittedError, SystemCallError: one cannot be removed.
    """
    for path in own_files(place):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror("cannot remove the file", error, where=str(path)) from error


def tidy(place: Place) -> bool:
    """Removes its empty directories; False where something is left."""
    for directory, _, _ in os.walk(place.path, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    return not place.path.exists()


def left(found: tuple[Place, ...]) -> Iterator[str]:
    """What stays, and how to get rid of it."""
    for place in found:
        if place.path.exists():
            yield f"left in place: {place.path} ({place.what}); to remove it: {place.mend}"
