# SPDX-License-Identifier: Apache-2.0
"""docs/versions.md: the table of versions says what the code has."""

from __future__ import annotations

import tomllib
from dataclasses import astuple
from pathlib import Path

from support.interfaces import Interfaces, interfaces

from infiniswap.control.messages import VERSIONS


def rows(root: Path) -> dict[str, Interfaces]:
    """The table, by version."""
    text = (root / "docs" / "versions.md").read_text(encoding="utf-8")
    _, _, *lines = text[text.index("| version |") :].partition("\n\n")[0].splitlines()
    found = {}
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = Interfaces(*(frozenset(map(int, cell.split(","))) for cell in cells))
    return found


def test_the_last_row_is_this_tree(project_root: Path) -> None:
    table = rows(project_root)
    assert astuple(table[[*table][-1]]) == astuple(interfaces(project_root))


def test_every_release_has_a_row_and_pending_changes_have_the_last(project_root: Path) -> None:
    changelog = (project_root / "CHANGELOG.md").read_text(encoding="utf-8")
    released = [line.split()[1] for line in changelog.splitlines() if line.startswith("## ")]
    version = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]["version"]
    assert version in released
    pending = ["next"] if list((project_root / "changes.d").glob("+*.md")) else []
    assert [*rows(project_root)] == [*reversed(released), *pending]


def test_from_version_2_on_a_release_speaks_the_one_before_as_well(project_root: Path) -> None:
    newest = max(VERSIONS)
    assert frozenset(range(max(2, newest - 1), newest + 1)) <= interfaces(project_root).control
    assert interfaces(project_root).control == set(VERSIONS)
