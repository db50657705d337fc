# SPDX-License-Identifier: Apache-2.0
"""Servers that jobs need, without their services: Debian starts a server as it is installed, so its
program is taken out of the package instead."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from infiniswap.errors import InfiniswapError
from isw_bench import machine
from isw_bench.children import output_of

_GET_S = 300.0


def find(program: str, build: Path) -> str | None:
    """Path of a program: installed, or taken out of its package."""
    return machine.find(program) or next(iter(_versions(program)), None) or _taken(program, build)


def _versions(program: str) -> list[str]:
    """PostgreSQL's programs lie in a directory for each version, the last one first."""
    return [
        str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))[::-1]
    ]


def _taken(program: str, build: Path) -> str | None:
    for path in sorted((build / "packages").glob(f"*/usr/bin/{program}")):
        return str(path)
    return None


def take(program: str, package: str, build: Path) -> None:
    """Takes the package apart below `build`, where apt has it; else the program stays missing."""
    if find(program, build) or machine.find("apt-get") is None:
        return
    target = build / "packages" / package
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        script = 'cd "$1" && apt-get download -qq "$2" && dpkg-deb -x "$2"_*.deb "$3"'
        argv = ["sh", "-c", script, "sh", directory, package, str(target)]
        try:
            output_of(argv, "", _GET_S)
            output_of([str(_taken(program, build)), "--version"], "", 20.0)  # has its libraries
        except (InfiniswapError, subprocess.SubprocessError):
            shutil.rmtree(target, ignore_errors=True)
