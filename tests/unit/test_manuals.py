# SPDX-License-Identifier: Apache-2.0
"""The manual pages in docs/man/ against the parsers, both ways, and against their readers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from manuals import pages, roff
from manuals.commands import whole
from support.machine.ran import ran

from infiniswap.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[2]
MADE = sorted((ROOT / "docs/man").glob("man[0-9]/*"))

_OPTION = re.compile(r"--[a-z][a-z-]*")


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _commands(below)


def _read(page: str) -> str:
    """A page as it is in the tree, without the markup of roff."""
    text = (ROOT / f"docs/man/man1/{page}.1").read_text(encoding="utf-8")
    return re.sub(r"\\f[BIR]|\\&|\\%", "", text).replace("\\-", "-").replace("\\(aq", "'")


def _parts(page: str) -> dict[str, str]:
    """What a page says of each command: under its heading in COMMANDS, else in OPTIONS."""
    text = _read(page)
    words = page.split("-")
    found = {" ".join(words): _section(text, "OPTIONS")}
    inner = re.split(r"^\.SS (.+)\n", _section(text, "COMMANDS"), flags=re.MULTILINE)[1:]
    for title, body in zip(inner[::2], inner[1::2], strict=True):
        found[" ".join([*words, title])] = body
    return found


def _section(text: str, title: str) -> str:
    match = re.search(rf"^\.SH {title}\n(.*?)(?=^\.SH |\Z)", text, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""


def _in_help(parser: argparse.ArgumentParser) -> set[str]:
    lines = re.findall(r"^  (-.*)$", parser.format_help(), re.MULTILINE)
    return {name for line in lines for name in _OPTION.findall(line.partition("  ")[0])}


@pytest.mark.parametrize("page", ["infiniswap", *(f"infiniswap-{name}" for name in COMMANDS)])
def test_a_page_documents_what_help_shows_and_nothing_else(page: str) -> None:
    top = build_parser(None if page == "infiniswap" else page.split("-")[1])
    documented = _parts(page)
    expected = {}
    for parser in _commands(top):
        if page.split("-") == parser.prog.split()[: len(page.split("-"))] and (
            page != "infiniswap" or parser is top
        ):
            expected[parser.prog] = _in_help(parser)
    assert documented.keys() == expected.keys()
    for command, text in documented.items():
        heads = re.findall(r"^\.TP\n(-.*)$", text, re.MULTILINE)
        names = {name for head in heads for name in _OPTION.findall(head)}
        if command != page.replace("-", " "):
            names.add("--help")  # said once for all actions
        assert names == expected[command], command
    if page == "infiniswap":
        assert set(re.findall(r"^infiniswap-(\w+)\(1\)$", _read(page), re.MULTILINE)) == set(
            COMMANDS
        )


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_options_in_the_texts_exist(path: Path) -> None:
    parsers = [parser for name in COMMANDS for parser in _commands(build_parser(name))]
    known = {"--help", "--version", "--now", "--"} | set().union(*map(_in_help, parsers))
    text = path.read_text(encoding="utf-8").replace("\\-", "-")
    assert set(_OPTION.findall(text)) <= known


def test_the_pages_in_the_tree_are_those_of_their_sources() -> None:
    made = {ROOT / "docs/man" / page.path: page.to_roff() for page in pages.pages()}
    assert sorted(made) == MADE, "run `make man`"
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make man`"


@pytest.mark.requires_tool("groff", "mandoc")
def test_readers_of_manual_pages_have_nothing_to_complain_about() -> None:
    done = ran("mandoc", "-T", "lint", "-W", "warning", *MADE)
    assert (done.returncode, done.stdout) == (0, "")
    # What `man` runs.
    done = ran("groff", "-K", "utf8", "-Tutf8", "-P-cbou", "-ww", "-man", *MADE)
    assert (done.returncode, done.stderr) == (0, "")
    for path in MADE:
        assert f" {path.stem} - " in " ".join(done.stdout.split())
    assert not re.search(r"\\[a-z(&]|\*\*|<!--", done.stdout), "markup is left over"


def test_a_source_that_lacks_something_is_refused_with_what_to_write(tmp_path: Path) -> None:
    command = whole().actions[0]
    source = tmp_path / "infiniswap-daemon.1.md"
    source.write_text("# infiniswap(1)\n")
    with pytest.raises(pages.PageError, match="the first line has to be"):
        pages.load(source, command)
    source.write_text("# infiniswap-daemon(1)\n\n## Examples\n\nnone\n")
    with pytest.raises(pages.PageError, match="missing: See also"):
        pages.load(source, command)


def test_roff_takes_no_text_for_a_request() -> None:
    lines = roff.render("## A\n\n.hidden and 'quoted\n\n- `--x` a\\b\n")
    assert lines == [
        ".SH A",
        ".PP",
        "\\&.hidden and 'quoted",
        ".IP \\(bu 2",
        "\\fB\\-\\-x\\fR a\\eb",
    ]
