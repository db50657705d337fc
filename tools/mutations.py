# SPDX-License-Identifier: Apache-2.0
"""Breaks the C library on purpose, one rule at a time, and looks which test notices.

Each file of tests/mutations/ is a patch with a sentence that says what it breaks. It is applied to
a scratch copy of the sources, which is built and tested; a mutation that no test program catches
is a rule that nothing holds up. `make mutations` runs all and prints the table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "tests" / "mutations"

_SOURCES = ("CMakeLists.txt", "pyproject.toml", "csrc", "tests/c", "tests/fuzz", "tools/bench/c")
_PROGRAMS = (
    "test_engine",
    "test_crash",
    "test_far",
    "test_holder",
    "test_rdma",
    "test_seal",
    "test_store",
    "test_sysfs",
    "test_tcp",
    "test_nbd_async",
    "test_nbd_fence",
    "test_nbd_share",
    "test_nbd_worker",
)
_SKIPPED = 77
_TEST_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Mutation:
    """One patch: `why` is its first paragraph."""

    path: Path

    @property
    def name(self) -> str:
        """Of the file."""
        return self.path.stem

    @property
    def why(self) -> str:
        """What it breaks."""
        return " ".join(self.path.read_text().partition("\n\n")[0].split())


def mutations() -> list[Mutation]:
    """Every patch, by name."""
    return [Mutation(path) for path in sorted(PATCHES.glob("*.patch"))]


def copy_sources(target: Path) -> None:
    """What a build needs, into an empty directory."""
    for name in _SOURCES:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)
        elif source.exists():
            shutil.copy2(source, copy)


def apply(mutation: Mutation, tree: Path, *, undo: bool = False) -> None:
    """Changes the tree; context may have moved, but must be there.

    Raises:
        RuntimeError: the patch does not fit any more: renew it.
    """
    argv = ["git", "apply", "-p1", "-C1", *(["-R"] if undo else []), str(mutation.path)]
    # Outside of any repository, so that paths are those of the tree.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{mutation.name} does not apply: {done.stderr.strip()}")


def build(tree: Path) -> None:
    """Builds the tests of the tree; compiles only what has changed."""
    directory = tree / "build"
    for argv in (
        ["cmake", "-S", str(tree), "-B", str(directory), "-DISW_TESTS=ON"],
        ["cmake", "--build", str(directory), "-j", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def programs(tree: Path) -> list[Path]:
    """The test programs that may notice."""
    found = (tree / "build" / "tests").iterdir()
    return sorted(p for p in found if p.name.startswith(_PROGRAMS) and os.access(p, os.X_OK))


def passes(program: Path, directory: Path) -> bool:
    """Whether a program finds nothing wrong; one that hangs has found something."""
    try:
        done = subprocess.run(
            [str(program)], cwd=directory, capture_output=True, timeout=_TEST_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, _SKIPPED)


def catchers(tree: Path) -> list[str]:
    """Names of the programs that fail."""
    found = programs(tree)
    with (
        tempfile.TemporaryDirectory(prefix="isw-mutation-") as directory,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        results = pool.map(lambda program: passes(program, Path(directory)), found)
        return [p.name for p, good in zip(found, results, strict=True) if not good]


def main() -> int:
    """Prints a line per mutation; 1 when one was not caught."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="only these")
    names = set(parser.parse_args().names)
    missed = []
    with tempfile.TemporaryDirectory(prefix="isw-mutations-") as directory:
        tree = Path(directory)
        copy_sources(tree)
        build(tree)
        if broken := catchers(tree):
            print(f"without any mutation these fail already: {', '.join(broken)}", file=sys.stderr)
            return 1
        for mutation in mutations():
            if names and mutation.name not in names:
                continue
            apply(mutation, tree)
            try:
                build(tree)
                caught = catchers(tree)
            finally:
                apply(mutation, tree, undo=True)
            print(
                f"| {mutation.name} | {mutation.why} | {', '.join(caught) or 'NOBODY'} |",
                flush=True,
            )
            if not caught:
                missed.append(mutation.name)
    if missed:
        print(f"not caught: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
