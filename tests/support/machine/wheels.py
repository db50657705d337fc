# SPDX-License-Identifier: Apache-2.0
"""`make wheel` and `make deb` in copies of this checkout."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.machine.ran import ran
from support.machine.runmode import IN_CI

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
_MAKE_S = 500.0
TEST_DEBS = Path(__file__).resolve().parents[3] / "build" / "test-debs"
"""Where tests in virtual machines, which cannot build any, find packages: `before` and `now`."""
_WHEN = "1700000000"


def environment() -> dict[str, str]:
    """Ours, without what the `make` that runs the tests hands down; with the programs of our
    virtual environment."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]])
    return {**clean, "PATH": path, "SOURCE_DATE_EPOCH": _WHEN}


def make_in(tree: Path, target: str, *settings: str, private: bool = False) -> Path:
    """Runs `make` in a tree, with our virtual environment; returns the directory of the results.

    Args:
        tree: with the sources; not this checkout.
        target: what to make.
        settings: NAME=VALUE for `make`.
        private: whoever builds lets nobody else read their files.
    """
    private_files = "umask 077; chmod -R go-rwx .; " if private else ""
    make = ("make", "--silent", f"VENV={sys.prefix}", *settings, target)
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
    return tree / "build" / "dist"


def copy_checkout(checkout: Path, tree: Path) -> Path:
    """Its files in a directory that is not there yet."""
    return Path(shutil.copytree(checkout, tree, ignore=_NOT_COPIED))


def make_wheel(checkout: Path, tree: Path, *, private: bool = False) -> Path:
    """Builds the wheel in `tree`, a copy of the checkout that is not there yet."""
    results = make_in(copy_checkout(checkout, tree), "wheel", private=private)
    (wheel,) = results.glob("*.whl")
    return wheel


@dataclass(frozen=True, slots=True)
class Debs:
    """Packages of one release of Debian: the one of this checkout, and the one before it."""

    before: Path
    now: Path


def make_debs(checkout: Path, directory: Path) -> dict[str, Debs]:
    """Builds packages, by the number of the release.

    The one before is the previous commit's, or where that cannot be had this checkout's with
    another version. There is no release yet.
    """
    former = directory / "former"
    former.mkdir()
    # In one that is not the owner's git says why; then there is nothing to unpack.
    ran("sh", "-c", 'git -C "$0" archive HEAD^ | tar -x -C "$1"', checkout, former)
    makefile = former / "Makefile"
    if not makefile.exists() or "\ndeb: " not in makefile.read_text():
        shutil.rmtree(former)
        copy_checkout(checkout, former)
    before = make_in(former, "deb", "DEB_ARGS=--version 0.0.1")
    now = make_in(copy_checkout(checkout, directory / "now"), "deb")
    found = {}
    for path in now.glob("*.deb"):
        number = path.name.partition("~deb")[2].partition("_")[0]
        (former_path,) = before.glob(f"*~deb{number}_*.deb")
        found[number] = Debs(former_path, path)
    return found


def make_test_debs(checkout: Path) -> None:
    """Fills TEST_DEBS."""
    shutil.rmtree(TEST_DEBS, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=checkout / "build") as directory:
        for debs in make_debs(checkout, Path(directory)).values():
            for kind, path in (("before", debs.before), ("now", debs.now)):
                (TEST_DEBS / kind).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, TEST_DEBS / kind)
