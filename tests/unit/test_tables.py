# SPDX-License-Identifier: Apache-2.0
"""Tables and sentences show text as it is, whatever it means to the library that draws them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from rich.table import Table

from infiniswap.cli.common.output import plain_console, results_console
from infiniswap.cli.device import tables
from infiniswap.cli.status import _print_tables
from infiniswap.errors import NoDonorError
from infiniswap.units import HostPort
from infiniswap.watch.asking import AskedDonor

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("[fd00::2]:9400", "/x/[red]r[/red]/c", ":cat:", "[/]", "[link=http://a]b[/link]", "\\[b]")


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(f"heading {name}", title=f"title {name}", caption=f"caption {name}")
    table.add_row(f"cell {name}")
    for console in (results_console(), plain_console(width=80)):
        console.print(table)
        console.print(f"sentence {name}")
        said = capsys.readouterr().out
        for place in ("heading", "title", "caption", "cell", "sentence"):
            assert f"{place} {name}" in said


def test_a_device_is_listed_under_its_own_state(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_table([], {"d": "no answer: [Errno 2] /x/[red]r/c"})
    assert "no answer: [Errno 2] /x/[red]r/c" in capsys.readouterr().out


def test_status_shows_ipv6_addresses_and_paths_whole(capsys: pytest.CaptureFixture[str]) -> None:
    why = NoDonorError("no such file: /x/[red]r/c")
    asked = AskedDonor(HostPort("fd00::2", 9400), None, why.what, why)
    device = {"name": "d", "state": "failed: /x/[red]r/c"}
    _print_tables([asked], [device])
    said = capsys.readouterr().out
    assert " [fd00::2]:9400 " in said
    assert "[fd00::2]:9400: no such file: /x/[red]r/c" in said
    assert "failed: /x/[red]r/c" in said


def test_only_one_place_makes_consoles() -> None:
    makers = [
        path.relative_to(ROOT)
        for path in (ROOT / "infiniswap").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Console"
    ]
    assert makers == [Path("infiniswap/cli/common/output.py")]
