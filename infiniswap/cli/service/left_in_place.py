# SPDX-License-Identifier: Apache-2.0
"""What an installation leaves beside its units: settings, devices' contents, run-time directories.

Infiniswap writes no modules, sysctls, tmpfiles or the like, so none are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.config import DEFAULT_PATH, SECTIONS, Config, DaemonConfig
from infiniswap.device.spec.rundir import LINK_DIR
from infiniswap.errors import from_oserror
from infiniswap.planning import history

_NAMES_MAX = 5


@dataclass(frozen=True, slots=True)
class LeftPlace:
    """A directory of Infiniswap.

    Attributes:
        path: where.
        what: lies there.
        mend: how to get rid of it in order.
        own: patterns of the files that `--purge` removes.
        named: more of them, by their paths; those that lie elsewhere are left alone.
    """

    path: Path
    what: str
    mend: str
    own: tuple[str, ...] = ()
    named: tuple[Path, ...] = ()


def places(root: Path, config: Config) -> tuple[LeftPlace, ...]:
    """Every directory that daemon, devices and `infiniswap init` make, below the root."""
    purge = "infiniswap service uninstall --purge"
    state = ("*.drain", "donor.pem", "donor.crt", "host-secret", history.NAME)
    of_port = ("metrics.pem", "metrics.crt")
    host_key = ("host-key", "host-key.tpm")
    kept = ("*.device", "*.tables", "*.key", "*.backup", *host_key)
    contents = (*kept, *of_port, *state)
    found = [
        LeftPlace(
            DEFAULT_PATH.parent,
            "settings, secrets and declared devices",
            purge,
            (DEFAULT_PATH.name, "secret", ".join-*", "devices/*.env"),
            tuple(_named(config)),
        ),
        LeftPlace(config.device.backup_dir, "contents of stopped devices", purge, contents),
        LeftPlace(config.daemon.state_dir, "state of the donor, and of plans", purge, state),
        # systemd makes it in any case.
        LeftPlace(DaemonConfig().state_dir, "state of the donor, and of plans", purge, state),
        LeftPlace(
            config.device.run_dir, "devices that run or have died", "infiniswap device remove NAME"
        ),
        LeftPlace(LINK_DIR, "links to devices", "infiniswap device remove NAME"),
    ]
    if config.daemon.run_dir is not None:
        mend = "infiniswap daemon --release"
        found.append(LeftPlace(config.daemon.run_dir, "memory that is still lent", mend))
    unique = {place.path: place for place in reversed(found)}
    return tuple(
        dataclasses.replace(
            place,
            path=root / place.path.relative_to("/"),
            named=tuple(root / path.relative_to("/") for path in place.named),
        )
        for place in unique.values()
    )


def _named(config: Config) -> Iterator[Path]:
    """Every file that the configuration names: secrets, tokens, certificates, lists."""
    for section, kind in SECTIONS.items():
        for entry in dataclasses.fields(kind):
            path = getattr(config.section(section), entry.name)
            if entry.name.endswith("_file") and path is not None and ".." not in path.parts:
                yield path


def own_files(place: LeftPlace) -> list[Path]:
    """Files there that `--purge` removes."""
    found = {path for pattern in _patterns(place) for path in place.path.glob(pattern)}
    found |= set(place.named)
    return sorted(
        path
        for path in found
        if _is_below(path, place.path) and (os.path.islink(path) or os.path.isfile(path))
    )


def _patterns(place: LeftPlace) -> Iterator[str]:
    """Yields the patterns of the files and of their half-written copies."""
    for pattern in place.own:
        head, slash, name = pattern.rpartition("/")
        yield from (pattern, f"{head}{slash}.{name}.*")


def _is_below(path: Path, directory: Path) -> bool:
    """Whether it really lies below: a directory on its path may be a link that leads out."""
    try:
        return path.parent.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def purge(place: LeftPlace) -> None:
    """Removes them.

    Raises:
        NotPermittedError, SystemCallError: one cannot be removed.
    """
    for path in own_files(place):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror("cannot remove the file", error, where=str(path)) from error


def own_directories(place: LeftPlace) -> list[Path]:
    """The place, and those in it that are ours: inner ones first."""
    if not place.own:
        return [Path(path) for path, _, _ in os.walk(place.path, topdown=False)]
    files = [*(place.path / pattern for pattern in place.own), *place.named]
    found = {
        parent
        for file in files
        if _is_below(file, place.path)
        for parent in file.parents
        if parent.is_relative_to(place.path)
    }
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def tidy(place: LeftPlace) -> bool:
    """Removes its empty directories; False where something is left."""
    for directory in own_directories(place):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    return not place.path.exists()


def strangers(place: LeftPlace) -> list[str]:
    """Files that `--purge` leaves because they are not Infiniswap's: names below the place."""
    directories = own_directories(place)
    known = {*own_files(place), *directories}
    found = []
    for directory in directories:
        with contextlib.suppress(OSError):
            found += [path for path in directory.iterdir() if path not in known]
    return sorted(str(path.relative_to(place.path)) for path in found)


def left(found: tuple[LeftPlace, ...], *, purged: bool, tidied: bool) -> Iterator[str]:
    """What stays, and how to get rid of it.

    Args:
        found: the places.
        purged: Infiniswap's files go, or are gone.
        tidied: empty directories are gone.
    """
    for place in found:
        if not place.path.exists():
            continue
        stays = f"left in place: {place.path} ({place.what})"
        others = strangers(place) if place.own else []
        is_ours = not place.own or (bool(own_files(place)) and not purged)
        if is_ours:
            yield f"{stays}; to remove it: {place.mend}"
        if others:
            more = len(others) - _NAMES_MAX
            names = ", ".join(others[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
            yield (
                "left in place, because they do not belong to Infiniswap and its configuration "
                f"does not name them: {names} in {place.path}; remove them by hand if they are not "
                "needed"
            )
        if tidied and not is_ours and not others:
            yield f"{stays}, which is empty: it is a link or a mount point"
