# SPDX-License-Identifier: Apache-2.0
"""`make wheel` in a copy of this checkout, and where the result is installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from support.machine.ran import ran
from support.machine.runmode import IN_CI

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
_MAKE_S = 500.0
_WHEN = "1700000000"


def environment() -> dict[str, str]:
    """Ours, without what the `make` that runs the tests hands down; with the programs of our
    virtual environment."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]])
    return {**clean, "PATH": path, "SOURCE_DATE_EPOCH": _WHEN}


def make_wheel(checkout: Path, tree: Path, *, private: bool = False) -> Path:
    """Builds the wheel in `tree`, a copy of the checkout.

    Args:
        checkout: whose files are copied, whose virtual environment is used.
        tree: not there yet.
        private: whoever copies and builds lets nobody else read their files.
    """
    shutil.copytree(checkout, tree, ignore=_NOT_COPIED)
    private_files = "umask 077; chmod -R go-rwx .; " if private else ""
    make = ("make", "--silent", f"VENV={sys.prefix}", "wheel")
    done = ran(
        *("sh", "-c", f'{private_files}exec "$@"', "sh", *make),
        cwd=tree,
        env=environment(),
        wait_s=_MAKE_S,
    )
    lacking = [line for line in done.stderr.splitlines() if "asked for and not found" in line]
    if lacking and not IN_CI:
        pytest.skip(lacking[0].strip())
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "build" / "dist").glob("*.whl")
    return wheel
