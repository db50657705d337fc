# SPDX-License-Identifier: Apache-2.0
"""What guides of docs/howto need beside Infiniswap: whether it is there, and what a test adds.

`make test-guides` installs what PyPI has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support.documents import Block
from support.machine.ran import ran
from support.machine.usershell import bash, smaller

_EXTRAS = "make test-guides"
NEEDS = {
    "dask": _EXTRAS,
    "distributed": _EXTRAS,
    "duckdb": _EXTRAS,
    "jupyter": _EXTRAS,
    "polars": _EXTRAS,
    "spark-submit": _EXTRAS,
    "java": "apt-get install default-jre-headless",
    "podman": "apt-get install podman runc",
}
"""Modules and programs, and the command that installs each."""

GIB_MIB = 48
"""So many MiB are a GiB when a guide's commands are run."""
PAGED = re.compile(r"paged out (?!0 B)\S+ \S+, in (?!0 B).* \(donors (?!0\.0%)")
"""In the summary of a job to which pages came back from donors."""
_IMAGE = "isw-guide"
_MINUTE_S = 60.0


def is_there(need: str) -> bool:
    """Whether a program or a module is installed."""
    beside = Path(sys.executable).parent / need
    return beside.exists() or bool(shutil.which(need) or importlib.util.find_spec(need))


def skip_without(needs: Sequence[str]) -> None:
    """Skips where one is missing, with the way to get it."""
    if missing := [need for need in needs if not is_there(need)]:
        pytest.skip(f"needs {', '.join(f'{need} ({NEEDS[need]})' for need in missing)}")


def shell(block: Block, changes: Mapping[str, str]) -> list[str]:
    """A block as a command line, with small sizes and the changes of a test."""
    text = smaller(block.body, GIB_MIB)
    for old, new in changes.items():
        assert old in text, f"{block.where}: no {old}"
        text = text.replace(old, new)
    return bash(text)


@contextlib.contextmanager
def prepare(needs: Sequence[str], programs: Path) -> Iterator[None]:
    """Adds stand-ins to a directory of the search path, and what they need."""
    if "podman" not in needs:
        yield
        return
    _image(programs / "image.tar")
    try:
        _podman(programs / "podman")
        yield
    finally:
        ran("/usr/bin/podman", "rmi", "--force", _IMAGE, wait_s=_MINUTE_S)


def _image(file: Path) -> None:
    """An image with nothing of its own: its /usr is this machine's."""
    with tarfile.open(file, mode="w") as archive:
        for name in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        for name in ("usr", "tmp", "etc", "dev", "proc", "sys"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(directory)
    done = ran("/usr/bin/podman", "import", file, _IMAGE, wait_s=_MINUTE_S)
    assert done.returncode == 0, done.stderr


_PODMAN = f"""#!/bin/bash
[ "$1" = run ] || exec /usr/bin/podman "$@"
shift
exec /usr/bin/podman --runtime runc run --network host --volume /usr:/usr:ro \\
    --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 "${{@/#IMAGE/{_IMAGE}}}"
"""
"""podman would raise limits, which takes CAP_SYS_RESOURCE, and make a network, which takes programs
that a test need not have."""


def _podman(file: Path) -> None:
    file.write_text(_PODMAN)
    file.chmod(0o755)
