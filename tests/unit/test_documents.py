# SPDX-License-Identifier: Apache-2.0
"""Where pages of the documentation lie, and what messages and pages say of places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniswap import documents
from infiniswap.units import CONTROL_PORT, DATA_PORT, INVITATION_PORT


def strings(source: str) -> Iterator[str]:
    """Every text of a module that is no docstring."""
    tree = ast.parse(source)
    silent = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in silent
        ):
            yield node.value


def sources(project_root: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted((project_root / "infiniswap").rglob("*.py")):
        yield path.relative_to(project_root), path.read_text()


def test_messages_name_pages_where_they_lie(project_root: Path) -> None:
    """A path below docs/ says nothing on a host that has a package or a wheel."""
    named = [
        (path, text)
        for path, source in sources(project_root)
        for text in strings(source)
        if re.search(r"\bdocs/[\w/-]+\.md", text)
    ]
    assert named == []


def test_every_page_that_messages_name_is_there(project_root: Path) -> None:
    named = {
        name
        for _, source in sources(project_root)
        for name in re.findall(r"\bpage\(['\"]([^'\"]+)['\"]\)", source)
    }
    assert "when-to-use.md" in named
    for name in named:
        assert documents.page(name) == str(project_root / "docs" / name)


@pytest.mark.parametrize("place", [0, 1])
def test_a_page_is_found_in_the_first_place_that_has_it(tmp_path: Path, place: int) -> None:
    places = tmp_path / "checkout", tmp_path / "wheel"
    page = places[place] / "x.md"
    page.parent.mkdir()
    page.touch()
    assert documents.page("x.md", places) == str(page)


def test_a_host_without_pages_is_told_the_name_in_the_sources(tmp_path: Path) -> None:
    assert documents.page("x.md", (tmp_path,)) == "docs/x.md in the sources"


def test_wheels_have_the_pages_where_messages_look(project_root: Path) -> None:
    cmake = (project_root / "CMakeLists.txt").read_text()
    where = re.search(r'install\(DIRECTORY docs/ DESTINATION "\$\{SKBUILD_DATA_DIR\}/(.+?)"', cmake)
    assert where
    assert documents.PLACES[1].match(f"*/{where[1]}")


def test_no_device_has_a_port_of_the_daemon_or_of_invitations(project_root: Path) -> None:
    taken = {CONTROL_PORT, DATA_PORT, INVITATION_PORT}
    given = [
        (path.name, int(port))
        for path in (project_root / "docs").rglob("*.md")
        for port in re.findall(r"metrics[-_]listen[ =\"]+[\w.:\[\]]*:(\d+)", path.read_text())
    ]
    assert len(given) > 1
    assert [each for each in given if each[1] in taken] == []


def test_a_link_to_a_section_of_the_readme_has_its_anchor(project_root: Path) -> None:
    """Such a link without one names a section that nobody notices when it goes."""
    links = [
        (path.name, text)
        for path in (project_root / "docs").rglob("*.md")
        for text in re.findall(r"\[([^\]]+)\]\((?:\.\./)+README\.md\)", path.read_text())
    ]
    assert [each for each in links if each[1] != "README"] == []
