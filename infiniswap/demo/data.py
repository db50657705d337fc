# SPDX-License-Identifier: Apache-2.0
"""TPC-H data, as `tpchgen-cli` makes it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from infiniswap.demo.children import Child
from infiniswap.errors import UnavailableError, from_oserror
from infiniswap.extras import DEMO, how_to_install

TABLES = ("lineitem", "orders", "customer")
_GENERATE_S_MAX = 600.0


def generator() -> str | None:
    """Path of the program, None when it is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "tpchgen-cli"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("tpchgen-cli")


def cache_dir(scale: str) -> Path:
    """Where `--keep` keeps the data of a scale factor."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "infiniswap" / f"tpch-sf{scale}"


def files(directory: Path) -> list[Path]:
    """The files of a data set."""
    return [directory / f"{table}.parquet" for table in TABLES]


def is_complete(directory: Path) -> bool:
    """Whether a data set is there; one is moved to the cache only when it is whole."""
    return all(path.is_file() for path in files(directory))


def generate(target: Path, scale: str) -> None:
    """Makes the tables in `target`, which must not exist.

    Raises:
        UnavailableError: the generator is not installed.
        SystemCallError, DeadlineError: it failed; says what it printed.
    """
    program = generator()
    if program is None:
        mend = how_to_install(DEMO, "infiniswap demo", as_root=True)
        raise UnavailableError("tpchgen-cli is not installed", mend=mend)
    argv = [program, "parquet", "--quiet", "--scale-factor", scale]
    argv += ["--tables", ",".join(TABLES), "--output-dir", str(target)]
    child = Child("tpchgen-cli", argv, target.with_name("tpchgen.log"))
    try:
        child.check(child.wait(_GENERATE_S_MAX, lambda: None, 0.2))
    finally:
        child.end(1.0)


def keep(made: Path, scale: str) -> Path:
    """Moves a data set to the cache and returns its place there.

    Raises:
        NotPermittedError, SystemCallError: no room or no right to.
    """
    target = cache_dir(scale)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise from_oserror("cannot keep the data", error, where=str(target)) from error
    return target


def forget_cached_pages(paths: Iterable[Path]) -> None:
    """Makes the kernel drop these files' pages, so that each job reads them from disk, into its own
    cgroup. Only advice: if the kernel ignores it, all jobs but the first gain alike."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
