# SPDX-License-Identifier: Apache-2.0
"""What the demo needs of a host: looked at before anything is made."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from infiniswap import rights
from infiniswap.demo import data
from infiniswap.errors import (
    MemoryLimitError,
    NotFoundError,
    NotPermittedError,
    SystemCallError,
    UnavailableError,
)
from infiniswap.extras import DEMO, how_to_install
from infiniswap.system.memory import host_memory, memory_hierarchy
from infiniswap.system.programs import find, missing
from infiniswap.system.userfault import far_obstacle
from infiniswap.units import GIB, format_size_short

DISK_BYTES_MIN = 3 * GIB
"""The volume, the data and the outputs."""
FAR_DISK_BYTES_MIN = 4 * GIB
"""The backup of the job with far memory beside that, of which a run wants all to be free."""
MEMORY_BYTES_MIN = 3 * GIB
"""The job without a limit, and what the donors keep ready."""

_TOOLS = ("losetup", "mkswap", "setpriv", "swapoff", "swapon")


def check(parent: Path) -> None:
    """Refuses a host that cannot run the demo.

    Args:
        parent: where the work directory will be.

    Raises:
        NotPermittedError: not root.
        UnavailableError: something is not installed, or the kernel lacks it.
        NotFoundError: no such directory.
        MemoryLimitError: not enough memory.
        SystemCallError: not enough disk space.
    """
    if os.geteuid() != 0:
        raise NotPermittedError(
            "the demo makes swap space and memory cgroups, which needs root",
            mend="Run it with sudo: sudo infiniswap demo (from a checkout: sudo make demo).",
        )
    if lacking := rights.lacking("CAP_SYS_ADMIN"):
        raise NotPermittedError(
            f"swap space and memory cgroups need {lacking}", mend=f"{rights.way_to(lacking)}."
        )
    check_packages(importlib.util.find_spec, data.generator)
    check_tools(_TOOLS)
    check_kernel()
    far_bytes = 0 if far_obstacle() is not None else FAR_DISK_BYTES_MIN
    check_disk(parent, shutil.disk_usage, DISK_BYTES_MIN + far_bytes)
    available_bytes = host_memory().available_bytes
    if available_bytes < MEMORY_BYTES_MIN:
        raise MemoryLimitError(
            f"the demo needs {format_size_short(MEMORY_BYTES_MIN)} of free memory, and "
            f"{format_size_short(available_bytes)} are available",
            mend="End other programs, or use a larger machine.",
        )


def check_packages(
    find: Callable[[str], object | None], find_generator: Callable[[], str | None]
) -> None:
    """Raises UnavailableError unless the `demo` extra is installed."""
    absent = [name for name in ("pandas", "pyarrow") if find(name) is None]
    if find_generator() is None:
        absent.append("tpchgen-cli")
    if absent:
        mend = how_to_install(DEMO, "infiniswap demo", as_root=True)
        raise UnavailableError(f"not installed: {', '.join(absent)}", mend=mend)


def check_tools(tools: Iterable[str]) -> None:
    """Raises UnavailableError unless every system command is there."""
    for name in tools:
        if find(name) is None:
            raise missing(name)


def check_kernel() -> None:
    """Raises UnavailableError unless the kernel and the build have what the demo uses."""
    from infiniswap.engine.native import library_features

    if "fuse" not in library_features():
        raise UnavailableError(
            "this build has no fuse front end",
            mend="Install libfuse3-dev and pkg-config, and install infiniswap again.",
        )
    needed = {
        "/dev/fuse": "Load it: modprobe fuse.",
        "/dev/loop-control": "Load it: modprobe loop.",
        "/proc/swaps": "Use a kernel with CONFIG_SWAP.",
    }
    for path, mend in needed.items():
        if not Path(path).exists():
            raise UnavailableError(f"this host has no {path}", mend=mend)
    memory_hierarchy()


def check_disk(
    parent: Path, usage: Callable[[Path], object], needed_bytes: int = DISK_BYTES_MIN
) -> None:
    """Raises NotFoundError or SystemCallError unless `parent` has room."""
    if not parent.is_dir():
        raise NotFoundError(
            "there is no such directory", where=str(parent), mend="Name another with --dir."
        )
    free_bytes = int(getattr(usage(parent), "free"))  # noqa: B009 - shutil's tuple has no public name
    if free_bytes < needed_bytes:
        raise SystemCallError(
            f"the demo needs {format_size_short(needed_bytes)} of disk space, and "
            f"{format_size_short(free_bytes)} are free",
            where=str(parent),
            mend="Free some, or name another directory with --dir.",
        )
