# SPDX-License-Identifier: Apache-2.0
"""Every C test program (tests/c/test_*.c), plain and under sanitizers: exit 0, 1, or 77 (skip)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import sanitizers

_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("test_*.c"))
_SKIPPED = 77
_TIME_S_MAX = 280
_BUILDS = {"c": "make setup", "asan": "make asan", "tsan": "make tsan"}


@pytest.mark.parametrize("program", _PROGRAMS)
@pytest.mark.parametrize("build", _BUILDS)
def test_c_program(build: str, program: str, in_ci: bool, tmp_path: Path) -> None:
    directory = _ROOT / "build" / build
    binary = directory / "tests" / program
    if build != "c" and not in_ci and not binary.exists():
        pytest.skip(f"no {build} build: {_BUILDS[build]}")
    assert binary.exists(), f"not built: run `{_BUILDS[build]}`"
    done = subprocess.run(
        sanitizers.command(build, [str(binary)]),
        check=False,
        capture_output=True,
        cwd=tmp_path,
        env=sanitizers.ENV,
        timeout=_TIME_S_MAX,
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == _SKIPPED:
        pytest.skip(output.strip().splitlines()[-1] if output.strip() else "no reason given")
    assert done.returncode == 0, f"exit {done.returncode}\n{output[-8000:]}"
