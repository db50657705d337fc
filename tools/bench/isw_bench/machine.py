# SPDX-License-Identifier: Apache-2.0
"""The machine a run was on, the programs it used, and installing those."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infiniswap import __version__
from infiniswap.system.memory import machine_memory
from infiniswap.system.programs import SEARCH_PATH
from isw_bench.children import output_of

PEERS = {"nbdkit": "nbdkit", "nbdfuse": "libnbd-bin", "fio": "fio"}
"""Programs we compare with or measure by, and their Debian packages."""

_INSTALL_S = 600.0


def find(program: str) -> str | None:
    """Path of a program, None when it is not installed."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{SEARCH_PATH}")


def install_peers(peers: Mapping[str, str]) -> list[str]:
    """Installs what is missing, as root on Debian. Returns what is still missing.

    Args:
        peers: packages by a program of theirs.
    """
    missing = sorted({package for program, package in peers.items() if find(program) is None})
    if missing and os.geteuid() == 0 and find("apt-get"):
        print(f"bench: installing {' '.join(missing)}", flush=True)
        env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        for argv in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
        ):
            subprocess.run(
                argv, env=env, stdout=subprocess.DEVNULL, check=False, timeout=_INSTALL_S
            )
    return sorted({package for program, package in peers.items() if find(program) is None})


def _first_line(argv: list[str]) -> str:
    try:
        lines = output_of(argv, "", 20.0).strip().splitlines()
    except Exception as error:
        return f"not available ({error})"
    return lines[0] if lines else ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def load() -> list[float]:
    """Load averages of 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def busy_share(seconds: float) -> float:
    """Watches all processors for that long: which part of their time they were busy."""

    def ticks() -> tuple[int, int]:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        fields = [int(field) for field in line.split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    passed = max(1, total_after - total)
    return round(1 - (idle_after - idle) / passed, 3)


def describe(root: Path) -> dict[str, Any]:
    """Machine and versions. `root`: the checkout."""
    pretty = ""
    with open("/etc/os-release", encoding="utf-8") as file:
        for line in file:
            if line.startswith("PRETTY_NAME="):
                pretty = line.partition("=")[2].strip().strip('"')
    return {
        "machine": {
            "processor": _processor(),
            "processors": os.cpu_count(),
            "memory_bytes": machine_memory().total_bytes,
            "kernel": platform.release(),
            "system": pretty,
        },
        "versions": {
            "infiniswap": __version__,
            "commit": _first_line(["git", "-C", str(root), "describe", "--always", "--dirty"]),
            "python": platform.python_version(),
            "nbdkit": _first_line(["nbdkit", "--version"]),
            "nbdfuse": _first_line(["nbdfuse", "--version"]),
            "fio": _first_line(["fio", "--version"]),
            "redis": _first_line(["redis-benchmark", "--version"]),
            "perftest": _first_line(["dpkg-query", "-W", "-f", "${Version}", "perftest"]),
            "cc": _first_line(["cc", "--version"]),
        },
    }
