# SPDX-License-Identifier: Apache-2.0
"""Block devices in /sys, of whatever driver: their numbers and the settings of their queues."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from infiniswap.system.files import SYS, try_read_text, try_write_text

Settings = tuple[tuple[str, str], ...]
"""Files of /sys/block/NAME/queue and what to write to them."""

_THROTTLING: Final = "wbt_lat_usec"

NOT_THROTTLED: Final[Settings] = ((_THROTTLING, "0"),)
"""Page-outs are not held back while page-ins take long. They disturb each other on a disk that does
one thing at a time, and not here, where who needs a page waits for a page-out first (ADR 55)."""

GIVEN_BACK: Final[Settings] = ((_THROTTLING, "-1"),)
"""What a device gets that stays when we have given it back: the kernel's own choice."""

FOR_MEMORY: Final[Settings] = (
    ("scheduler", "none"),  # there is no head to move; sorting only adds latency
    ("add_random", "0"),
)
"""For a device without moving parts."""

AS_MEMORY: Final[Settings] = (
    *FOR_MEMORY,
    ("rotational", "0"),  # swap then gives each processor a cluster of its own
    ("read_ahead_kb", "128"),  # for file systems; swap has its own
)
"""The same where the driver takes a device for a disk."""


def number_text(device: int) -> str:
    """A block device's number, as st_rdev has it, in the kernel's form "major:minor"."""
    return f"{os.major(device)}:{os.minor(device)}"


def entries(directory: Path) -> tuple[Path, ...]:
    """What is in a directory, in order; empty when there is none."""
    try:
        return tuple(sorted(directory.iterdir()))
    except OSError:
        return ()


def with_partitions(number: str, *, sys: Path = SYS) -> tuple[str, ...]:
    """The numbers of a block device "major:minor" and of its partitions: a whole disk is in use
    when one of them is."""
    found = entries(sys / "dev" / "block" / number)
    texts = (try_read_text(entry / "dev") for entry in found if (entry / "partition").exists())
    return (number, *(text.strip() for text in texts if text is not None))


def numbers(directory: Path, prefix: str) -> tuple[int, ...]:
    """N of every entry `prefixN` of a directory, in order; empty when there is none."""
    pattern = re.compile(re.escape(prefix) + "([0-9]+)", re.ASCII)
    found: list[int] = []
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if match := pattern.fullmatch(entry.name):
                found.append(int(match[1]))
    return tuple(sorted(found))


def tune(name: str, settings: Iterable[tuple[str, str]], *, sys: Path = SYS) -> tuple[str, ...]:
    """Best effort: writes the settings that differ; returns the names of those that the kernel
    refused.

    Args:
        name: of the device in /sys/block.
        settings: of its queue, in this order.
        sys: where /sys is.
    """
    queue = sys / "block" / name / "queue"
    refused = []
    for file, value in settings:
        now = (try_read_text(queue / file) or "").strip()
        if now != value and f"[{value}]" not in now and not try_write_text(queue / file, value):
            refused.append(file)
    return tuple(refused)


def is_encrypted(path: Path, *, sys: Path = SYS) -> bool | None:
    """Whether a block device, or the file system of a file, lies on dm-crypt alone; None: the
    kernel does not say what it lies on (a file on btrfs).

    Raises:
        OSError: there is no such file.
    """
    attributes = path.stat()
    number = attributes.st_rdev if stat.S_ISBLK(attributes.st_mode) else attributes.st_dev
    directory = sys / "dev" / "block" / number_text(number)
    return _is_encrypted(directory, sys) if directory.exists() else None


def _is_encrypted(directory: Path, sys: Path) -> bool | None:
    if (try_read_text(directory / "dm/uuid") or "").startswith("CRYPT-"):
        return True
    if backing := try_read_text(directory / "loop/backing_file"):
        return is_encrypted(Path(backing.rstrip("\n")), sys=sys)
    below = [_is_encrypted(each, sys) for each in entries(directory / "slaves")]
    if not below or False in below:
        return False
    return None if None in below else True
