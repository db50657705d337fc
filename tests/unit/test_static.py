# SPDX-License-Identifier: Apache-2.0
"""The tools that read the code without running it, so that one summary covers everything."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from support.machine.ran import ran

import infiniswap


def _run(root: Path, *command: str | Path) -> None:
    done = ran(*command, cwd=root)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def _module(root: Path, name: str, *args: str) -> None:
    assert importlib.util.find_spec(name), f"{name} is missing: make setup"
    _run(root, sys.executable, "-m", name, *args)


def test_ruff_finds_nothing(project_root: Path) -> None:
    _module(project_root, "ruff", "check", "--no-cache", "infiniswap", "tools", "tests")


def test_python_is_formatted(project_root: Path) -> None:
    _module(project_root, "ruff", "format", "--no-cache", "--check", "infiniswap", "tools", "tests")


def test_mypy_finds_nothing(project_root: Path, tmp_path: Path) -> None:
    _module(project_root, "mypy", f"--cache-dir={tmp_path}")


@pytest.mark.requires_tool("clang-format")
def test_c_is_formatted(project_root: Path) -> None:
    files = [p for part in ("csrc", "tests/c") for p in (project_root / part).rglob("*.[ch]")]
    _run(project_root, "clang-format", "--dry-run", "--Werror", *files)


def test_the_version_is_one(project_root: Path) -> None:
    project = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]
    assert infiniswap.__version__ == project["version"]
    changelog = (project_root / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(project['version'])}\b", changelog, re.MULTILINE)
