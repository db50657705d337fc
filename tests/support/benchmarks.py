# SPDX-License-Identifier: Apache-2.0
"""Runs comparisons of tools/bench with little of everything, and looks at their figures."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from isw_bench import results, scope

from infiniswap.system import loop, mounts, swap
from support.machine.ran import ran


@dataclass
class Runner:
    """Runs comparisons of any suite with little of everything."""

    root: Path
    build: Path
    work: Path

    def command(self, suite: str, name: str, *options: str) -> list[str]:
        """The command line; results go to `build`/`suite`."""
        return [
            *(sys.executable, "-m", "isw_bench", suite, name, *options, "--no-install"),
            *("--build", str(self.build), "--work", str(self.work)),
            *("--output", str(self.build / suite)),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Of the command."""
        return {**os.environ, "PYTHONPATH": str(self.root / "tools" / "bench")}

    def results(self, suite: str, name: str, *options: str) -> dict[str, Any]:
        """Runs one comparison and returns its part of the JSON. What this host lacks is skipped."""
        done = ran(*self.command(suite, name, *options), env=self.environment, wait_s=800)
        assert done.returncode == 0, done.stdout + done.stderr
        data = json.loads((self.build / suite / "results.json").read_text())
        assert data["schema"] == 1
        assert data["machine"]["processors"] >= 1
        assert data["versions"]["infiniswap"]
        found: dict[str, Any] = data["comparisons"][name]
        if found["skipped"]:
            pytest.skip(found["skipped"])
        assert (self.build / suite / "results.md").read_text().startswith("### ")
        return found

    def interrupt(
        self,
        command: list[str],
        number: signal.Signals,
        in_the_middle: Callable[[], None],
        begun: str = "round 1",
    ) -> None:
        """Ends a run by a signal, `in_the_middle` of what the line with `begun` in it announces;
        nothing may be left."""
        with subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if begun in line:
                    break
            in_the_middle()
            process.send_signal(number)
            said = process.stdout.read()
            assert process.wait(120) == (130 if number == signal.SIGINT else -number), said
        if number == signal.SIGKILL:
            stale = scope.stale_directories(self.work)
            assert stale  # else nothing was tested
            assert [failure for path in stale for failure in scope.sweep(path)] == []
        assert not list(self.work.iterdir())


def check_figures(found: dict[str, Any], rounds: int = 2) -> None:
    """Every figure is a finite number of each round."""
    assert found["figures"]
    assert found["commands"]
    for figure in found["figures"]:
        for side in ("ours", "theirs", "ratio"):
            expected = 1 if "worst round" in figure["name"] else rounds
            assert figure[side]["count"] == expected, figure
            assert figure[side]["median"] is not None, figure
            assert math.isfinite(figure[side]["median"]), figure
            assert figure[side]["median"] >= 0, figure
        assert figure["verdict"] in results.VERDICTS


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """A directory on disk for runs; nothing may be in it at the end."""
    directory = Path(f"/var/tmp/isw-bench-test-{os.getpid()}")
    directory.mkdir()
    yield directory
    left = sorted(directory.iterdir())
    for path in left:
        scope.sweep(path)
    directory.rmdir()
    assert not left
    assert not [device for device in loop.attached() if str(directory) in device.backing]
    assert not [mount for mount in mounts.mounts() if str(directory) in mount.mount_point]
    assert not [area for area in swap.active_areas() if str(directory) in area.path]
