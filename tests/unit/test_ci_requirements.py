# SPDX-License-Identifier: Apache-2.0
"""What CI must have, one test each, and how tests/conftest.py treats what is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.machine.ran import ran

NEEDS = {
    name: getattr(pytest.mark, f"requires_{name}")
    for name in ("root", "native", "fuse", "loop", "memcg", "swap", "netns")
} | {
    "virtual machines": pytest.mark.requires_tool("qemu-system-x86_64", "busybox", "nbd-client"),
    "a browser": pytest.mark.requires_tool("chromium"),
    "userspace clients": pytest.mark.requires_tool(
        "nbdinfo", "nbdcopy", "nbdsh", "qemu-io", "fio", "mkfs.ext4"
    ),
}


@pytest.mark.parametrize("need", [pytest.param(name, marks=NEEDS[name]) for name in NEEDS])
def test_ci_has(need: str) -> None:
    pass


_SAMPLE = """
import pytest

@pytest.mark.requires_tool("no-such-tool-here")
def test_with_a_need():
    raise AssertionError("must not run")

def test_without_a_need():
    pass
"""


@pytest.mark.parametrize(
    ("ci", "code", "words"),
    [
        ("", 0, ("1 passed, 1 skipped", "needs no-such-tool-here")),
        ("1", 1, ("1 passed, 1 error", "CI must have it: needs no-such-tool-here")),
    ],
)
def test_what_is_missing_is_skipped_by_name_and_fails_in_ci(
    tmp_path: Path, project_root: Path, ci: str, code: int, words: tuple[str, ...]
) -> None:
    tests = project_root / "tests"
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_sample.py").write_text(_SAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = ran(
        *(sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", tmp_path),
        cwd=tmp_path,
        env={**os.environ, "INFINISWAP_CI": ci, "PYTHONPATH": f"{tests}:{project_root}/tools"},
    )
    assert done.returncode == code, done.stdout
    assert all(said in done.stdout for said in words), done.stdout
