# SPDX-License-Identifier: Apache-2.0
"""ublk devices as the kernel shows them in /sys and /dev: their numbers, their queue settings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap.errors import InfiniswapError
from infiniswap.system import block
from infiniswap.system.files import SYS, try_read_int
from infiniswap.system.programs import run_command

CONTROL: Final = Path("/dev/ublk-control")
LIMIT: Final = Path("module/ublk_drv/parameters/ublks_max")
_MODULE: Final = "ublk_drv"
_CHAR_DEVICES: Final = Path("class/ublk-char")
_REQUESTS: Final = "nr_requests"  # after the scheduler, which sets it
_MODE: Final = 0o600
"""The bytes are those of everybody's memory: for root only, as /dev/mem is."""


def block_path(number: int) -> Path:
    """The block device."""
    return Path(f"/dev/ublkb{number}")


def char_path(number: int) -> Path:
    """The device by which its process serves it."""
    return Path(f"/dev/ublkc{number}")


def numbers(*, sys: Path = SYS) -> tuple[int, ...]:
    """Every ublk device, anybody's, also those that no process serves."""
    return block.numbers(sys / _CHAR_DEVICES, "ublkc")


def has_driver(*, control: Path = CONTROL) -> bool:
    """Whether the kernel's driver is there."""
    return control.exists()


def load_driver(*, control: Path = CONTROL) -> bool:
    """Loads the kernel's module where that is not done; whether the driver is there then.

    Loading it takes no memory worth naming and changes nothing for anybody else.
    """
    if not has_driver(control=control) and os.geteuid() == 0:
        with contextlib.suppress(InfiniswapError):
            run_command(["modprobe", "--quiet", _MODULE])
    return has_driver(control=control)


def could_load_driver(*, control: Path = CONTROL) -> bool:
    """Whether `load_driver` would load a module that is not loaded yet. Loads nothing."""
    if has_driver(control=control) or os.geteuid() != 0:
        return False
    try:
        run_command(["modprobe", "--quiet", "--dry-run", _MODULE])
    except InfiniswapError:
        return False
    return True


def tune(number: int, queue_depth: int, *, sys: Path = SYS) -> tuple[str, ...]:
    """Queue settings and who may open the nodes.

    Of each queue one place stays empty: Linux 6.7 to 6.14 notice by the command that waits there
    that the device's process has died. Where all places are taken by requests they do so by the
    first request that has taken 30 s (ublk_drv.c: ublk_timeout).

    Args:
        number: of the device.
        queue_depth: of its queues, as it was made.

    Returns:
        Names of what the kernel refused.
    """
    name = block_path(number).name
    # All other settings the driver is told (ublk.c).
    settings = (*block.NOT_THROTTLED, *block.FOR_MEMORY, (_REQUESTS, str(queue_depth - 1)))
    refused = list(block.tune(name, settings, sys=sys))
    now = try_read_int(sys / "block" / name / "queue" / _REQUESTS)
    if _REQUESTS not in refused and now != queue_depth - 1:
        refused.append(_REQUESTS)  # the kernel has a minimum of its own
    return (*refused, *_protect((block_path(number), char_path(number))))


def _protect(nodes: tuple[Path, ...]) -> Iterator[str]:
    for node in nodes:
        try:
            os.chmod(node, _MODE)
            os.chown(node, 0, 0)
        except OSError:
            yield str(node)


def limit(*, sys: Path = SYS) -> int | None:
    """How many devices the driver allows (newer ones: only those of users other than root)."""
    return try_read_int(sys / LIMIT)
