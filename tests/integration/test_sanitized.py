# SPDX-License-Identifier: Apache-2.0
"""Two processes under sanitizers: an engine with its load, and a donor's store, over TCP.

The programs are those of `make bench`; each page that is read is compared with what was written.
No figure is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.machine import sanitizers
from support.machine.ran import ran

_ROOT = Path(__file__).resolve().parent.parent.parent
_BUILDS = {"asan": "make asan", "tsan": "make tsan"}
_WAIT_S = 240
_SLAB_BYTES = 4 << 20
_SLOTS = 2


class World:
    """A donor that serves, and what to start an engine with."""

    def __init__(self, directory: Path, build: str) -> None:
        self._directory = directory
        self._build = build
        self.donor = subprocess.Popen(
            sanitizers.command(build, [str(directory / "isw-bench-donor"), *self._size]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=sanitizers.ENV,
        )
        assert self.donor.stdout is not None
        line = self.donor.stdout.readline()
        assert line, self.end()
        self._told = json.loads(line)

    @property
    def _size(self) -> list[str]:
        return ["--slab-bytes", str(_SLAB_BYTES), "--slots", str(_SLOTS)]

    def load(self, *args: str) -> Any:
        """Fills the device, then runs the load for a while."""
        argv = [str(self._directory / "isw-bench-engine-load"), *self._size]
        argv += ["--port", str(self._told["port"]), "--ticket", self._told["ticket"]]
        command = sanitizers.command(self._build, [*argv, "--ms", "1500", *args])
        done = ran(*command, env=sanitizers.ENV, wait_s=_WAIT_S)
        assert done.returncode == 0, done.stderr[-8000:]
        return json.loads(done.stdout)

    def end(self) -> str:
        """Ends the donor; what it had to say."""
        _, errors = self.donor.communicate(timeout=_WAIT_S)
        return errors.decode()[-8000:]


@pytest.fixture(params=_BUILDS)
def world(request: pytest.FixtureRequest, in_ci: bool) -> Iterator[World]:
    build = request.param
    directory = _ROOT / "build" / build / "bench"
    if not in_ci and not (directory / "isw-bench-donor").exists():
        pytest.skip(f"no {build} build: {_BUILDS[build]}")
    world = World(directory, build)
    try:
        yield world
    finally:
        if world.donor.poll() is None:
            world.donor.kill()
            world.end()


def test_an_engine_and_a_donor_are_clean(world: World, tmp_path: Path) -> None:
    reads = world.load("--op", "read", "--depth", "24", "--threads", "2", "--queues", "3")
    assert reads["requests"] > 0
    assert reads["pages_not_from_donor"] == 0
    backup = tmp_path / "backup"
    backup.touch(0o600)
    with backup.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, _SLAB_BYTES * _SLOTS)
    for op in ("write", "read"):
        told = world.load(
            "--op", op, "--depth", "24", "--threads", "2", "--request-bytes", "16384",
            "--backup", str(backup),
        )  # fmt: skip
        assert told["requests"] > 0
    errors = world.end()
    assert world.donor.returncode == 0, errors
