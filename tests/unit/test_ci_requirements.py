# SPDX-License-Identifier: Apache-2.0
"""What CI must have, one test each, and how tests/conftest.py treats what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "need",
    [
        pytest.param(need, marks=getattr(pytest.mark, f"requires_{need}"))
        for need in ("root", "native", "fuse", "loop", "memcg", "swap", "netns")
    ],
)
def test_ci_has(need: str) -> None:
    pass


@pytest.mark.requires_tool("qemu-system-x86_64", "busybox", "nbd-client")
def test_ci_has_what_virtual_machines_need() -> None:
    pass


@pytest.mark.requires_tool("nbdinfo", "nbdcopy", "nbdsh", "qemu-io", "fio", "mkfs.ext4")
def test_ci_has_the_userspace_clients() -> None:
    pass


_SAMPLE = """
import pytest

@pytest.mark.requires_tool("no-such-tool-here")
def test_with_a_need():
    raise AssertionError("must not run")

def test_without_a_need():
    pass
"""


def _outcome(tmp_path: Path, project_root: Path, ci: str) -> tuple[int, str]:
    tests = project_root / "tests"
    conftest = (tests / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_sample.py").write_text(_SAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "INFINISWAP_CI": ci, "PYTHONPATH": f"{tests}:{project_root}/tools"},
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


def test_what_is_missing_is_skipped_by_name(tmp_path: Path, project_root: Path) -> None:
    code, output = _outcome(tmp_path, project_root, ci="")
    assert code == 0, output
    assert "1 passed, 1 skipped" in output
    assert "needs no-such-tool-here" in output


def test_in_ci_what_is_missing_fails(tmp_path: Path, project_root: Path) -> None:
    code, output = _outcome(tmp_path, project_root, ci="1")
    assert code == 1, output
    assert "1 passed, 1 error" in output
    assert "CI must have it: needs no-such-tool-here" in output
