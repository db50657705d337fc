# SPDX-License-Identifier: Apache-2.0
"""The documentation against the tree: names, links, commands, tables."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from support.documents import ROOT, documents

from infiniswap import config as configuration
from infiniswap import errors
from infiniswap.cli.main import COMMANDS, build_parser
from infiniswap.device.process import metrics as device_metrics
from infiniswap.donor import metrics as donor_metrics
from infiniswap.simulation import reading, scenario
from infiniswap.units import HostPort, format_size

CHANGES = sorted(path.relative_to(ROOT) for path in (ROOT / "changes.d").glob("*.md"))
DOCUMENTS = [*documents(), *CHANGES]
SCENARIOS = (Path("docs/simulation.md"),)
"""Documents whose TOML is no configuration."""
SCENARIO_KEYS = {
    configuration.key_name(entry)
    for kind in (*scenario.SECTIONS.values(), *scenario.LISTS.values())
    for entry in dataclasses.fields(kind)
}
WITH_NAMES = [path for path in DOCUMENTS if path.parts[0] == "docs"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(csrc|infiniswap|tests|tools|docs|\.ci|changes\.d)/[\w./-]*")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")


def _read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _prose(text: str) -> str:
    return _FENCE.sub("", text)


def _blocks(text: str, kind: str) -> list[str]:
    return [body for language, body in _FENCE.findall(text) if language == kind]


# ----------------------------------------------------------------------------- names


@functools.cache
def _sources() -> str:
    """Every source file, with a line for each."""
    files = [
        *(ROOT / "csrc").rglob("*.[ch]"),
        *(ROOT / "tests/c").glob("*.[ch]"),
        *(ROOT / "tests/integration").glob("*.py"),
        *(ROOT / "tests/vm").rglob("*.py"),
        *(ROOT / "infiniswap").rglob("*.py"),
        *(ROOT / "tools").glob("*"),
        *(ROOT / "tools/bench/isw_bench").rglob("*.py"),
        *(ROOT / "tools/monitoring").glob("*"),
        ROOT / "Makefile",
        ROOT / "CMakeLists.txt",
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())


@functools.cache
def _words() -> frozenset[str]:
    device = (metric.name for metric in device_metrics.METRICS)
    donor = (metric.name for metric in donor_metrics.METRICS)
    return frozenset([*re.findall(r"\w+", _sources()), *device, *donor])


@functools.cache
def _functions() -> frozenset[str]:
    """Names that are called or defined: `name(` in any source, C function pointers, C tests."""
    called = re.findall(r"(\w+)\(", _sources())
    tests = re.findall(r"^[A-Z_]+\((\w+)[,)]", _sources(), re.MULTILINE)
    return frozenset([*called, *tests, *re.findall(r"\(\*(\w+)\)\(", _sources())])


@functools.cache
def _methods() -> frozenset[str]:
    """`Class.method` of every Python class."""
    found = set()
    for path in (ROOT / "infiniswap").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {
                    f"{node.name}.{item.name}"
                    for item in node.body
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                }
    return frozenset(found)


def _unknown(name: str) -> str:
    """Why a name in code type is not in the tree; empty when it is, or is no name of ours."""
    if _PATH.fullmatch(name):
        return "" if (ROOT / name).exists() else "no such file"
    if match := re.fullmatch(r"(?:struct )?(\w+)\(\)", name):
        return "" if match[1] in _functions() else "no such function"
    if match := re.fullmatch(r"(\w+\.\w+)\(\)", name):
        return "" if match[1] in _methods() else "no such method"
    if match := re.fullmatch(r"(?:struct )?([A-Za-z]\w*)", name):
        known = match[1] in _words() or match[1] in COMMANDS or match[1] in SCENARIO_KEYS
        return "" if known else "no such name"
    if re.fullmatch(r"(daemon|device|cluster|policy|mqtt)\.\w+", name):
        return "" if name in configuration.known_keys() else "no such configuration key"
    return ""


@pytest.mark.parametrize("path", WITH_NAMES, ids=str)
def test_every_name_in_code_type_is_in_the_tree(path: Path) -> None:
    names = sorted(set(_CODE.findall(_prose(_read(path)))))
    problems = [f"`{name}`: {why}" for name in names if (why := _unknown(name))]
    assert not problems, "\n".join(problems)


def test_the_architecture_names_enough_to_be_a_walk() -> None:
    names = set(_CODE.findall(_prose(_read(Path("docs/architecture.md")))))
    assert len([name for name in names if name.endswith("()")]) > 80
    for name in ("iswi_engine_submit()", "stage_request()", "iswi_remote_submit()", "verify()"):
        assert name in names


def test_the_check_of_names_can_fail() -> None:
    assert _unknown("csrc/engine/no_such_file.c")
    assert _unknown("iswi_no_such_function()")
    assert _unknown("SlabMapper.no_such_method()")
    assert _unknown("struct iswi_no_such_struct")
    assert _unknown("daemon.no_such_key")
    assert not _unknown("SlabMapper.run()")
    assert not _unknown("csrc/engine/ops/write.c")


# ----------------------------------------------------------------------------- links


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    for target in _LINK.findall(_prose(_read(path))):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / path).parent / name if name else ROOT / path
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file.read_text(encoding="utf-8")), target


def test_every_decision_is_in_the_index() -> None:
    index = _read(Path("docs/adr/README.md"))
    for path in (ROOT / "docs/adr").glob("0*.md"):
        assert f"]({path.name})" in index
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {path.name[:4]}: ")
        assert "**Decided.**" in text
        assert "**What would change our mind.**" in text


# -------------------------------------------------------------------------- commands


def _command_lines(text: str) -> Iterator[list[str]]:
    """Every `infiniswap ...` command of the sh blocks, their variables filled in."""
    variables: dict[str, str] = {}
    for block in _blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and (match := re.fullmatch(r"([A-Z]+)=(.*)", words[0])):
                variables[match[1]] = match[2]
                del words[0]
            if words[:1] == ["sudo"]:
                del words[0]
            if words[:1] == ["infiniswap"]:
                yield [re.sub(r"\$([A-Z]+)", lambda m: variables[m[1]], word) for word in words[1:]]


def _mentioned(text: str) -> Iterator[list[str]]:
    """Every `infiniswap COMMAND ...` in running text."""
    for code in _CODE.findall(_prose(text)):
        words = shlex.split(code)
        if words[:1] == ["infiniswap"] and len(words) > 1:
            yield words[1:]


def test_commands_of_the_readme_parse() -> None:
    commands = list(_command_lines(_read(Path("README.md"))))
    assert {command[0] for command in commands} >= {"daemon", "run", "status"}
    for command in commands:
        args = build_parser(command[0]).parse_args(command)
        assert args.command == command[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_commands_in_running_text_exist(path: Path) -> None:
    for command in _mentioned(_read(path)):
        assert command[0] in COMMANDS, command
        if command[0] == "device" and len(command) > 1:
            actions = build_parser("device").parse_args
            minimal = ["device", command[1], *(["NAME"] if command[1] != "list" else [])]
            assert actions(minimal).action == command[1]
        options = [word for word in command if word.startswith("--") and word != "--"]
        text = " ".join(_help_of(command))
        assert all(option in text for option in options), command


def _help_of(command: list[str]) -> list[str]:
    parser: Any = build_parser(command[0])
    found = []
    while True:
        found.append(parser.format_help())
        nested = [
            a for a in parser._actions if hasattr(a, "choices") and isinstance(a.choices, dict)
        ]
        word = next((w for a in nested for w in command if w in a.choices), None)
        if word is None:
            return found
        parser = nested[0].choices[word]


def test_make_targets_of_the_documents_exist() -> None:
    targets = set(re.findall(r"^(\w+):", _read(Path("Makefile")), re.MULTILINE))
    for path in DOCUMENTS:
        text = _read(path)
        code = [*_CODE.findall(_prose(text)), *"\n".join(_blocks(text, "sh")).splitlines()]
        for line in code:
            if match := re.match(r"make (\w+)(?!\w*=)", line):
                assert match[1] in targets, line


def _readme_section(title: str) -> str:
    return _read(Path("README.md")).split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_a_checkout_is_tried_by_two_commands() -> None:
    assert _blocks(_readme_section("From a checkout"), "sh") == ["make demo\nmake test\n"]


def test_six_commands_lead_to_a_job_on_a_neighbour() -> None:
    section = _readme_section("Two hosts, six commands")
    lines = "".join(_blocks(section, "sh")).replace("\\\n", "").splitlines()
    assert len([line for line in lines if not re.match(r"[A-Z]+=", line)]) == 6


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len(_read(Path("README.md")).splitlines()) <= 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_configuration_files_in_the_documents_load(path: Path, tmp_path: Path) -> None:
    for number, block in enumerate(_blocks(_read(path), "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        if path in SCENARIOS:
            reading.read(file)
        else:
            configuration.load(file, environ={})


# ---------------------------------------------------------------------------- tables


def test_exit_codes_are_those_of_the_code() -> None:
    """test_errors.py compares the table in errors.py with its classes."""
    of_code = re.findall(r"^(\d+) +(\w+Error) +(.+)$", errors.__doc__ or "", re.MULTILINE)
    rows = [
        tuple(cell.strip(" `") for cell in line.split("|")[1:4])
        for line in _read(Path("docs/errors.md")).splitlines()
        if re.match(r"\| \d", line)
    ]
    assert all(meaning for _code, _name, meaning in rows)
    assert sorted(row for row in rows if row[1]) == sorted(of_code)


def _default_text(kind: type[Any], entry: dataclasses.Field[Any]) -> str:
    """A default as the configuration would write it."""
    value: Any = entry.default
    if entry.metadata.get("auto") and value is None:
        return "auto"
    if value is None or value in ((), ""):
        return ""
    if entry.metadata["kind"] == "size":
        return format_size(value)
    if isinstance(value, HostPort | Path):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    assert get_type_hints(kind)[entry.name] in (int, str, int | None)
    return str(value)


def test_every_configuration_key_is_described_with_its_default() -> None:
    text = _read(Path("docs/configuration.md"))
    described = {}
    for section, body in re.findall(
        r"^###? \[([\w.]+)\].*?\n(.*?)(?=^###? |\Z)", text, re.M | re.S
    ):
        for line in body.splitlines():
            if match := re.match(r"\| `(\w+)` \|(.*?)\|(.*)\|$", line):
                assert match[3].strip(), line
                described[f"{section}.{match[1]}"] = match[2].strip(" `")
    expected = {
        f"{section}.{configuration.key_name(entry)}": _default_text(kind, entry)
        for section, kind in configuration.SECTIONS.items()
        for entry in dataclasses.fields(kind)
    }
    assert tuple(expected) == configuration.known_keys()
    assert described == expected
    assert list(described) == list(expected), "not in the order of config.py"


def test_changes_are_named_by_their_kind() -> None:
    for path in (ROOT / "changes.d").iterdir():
        name = path.name
        assert name == "README.md" or re.fullmatch(
            r"\+[\w-]+\.(added|changed|fixed|removed|security)\.md", name
        ), name


def test_the_readme_denies_nothing_that_a_document_describes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    denied = re.search(r"What is not\s+there yet:\s+(.+?)\n\n", text, re.DOTALL)
    assert denied is not None
    words = set(re.findall(r"\w+", denied[1].lower()))
    subjects = {path.stem.lower() for path in (ROOT / "docs").glob("*.md")}
    assert {"discovery", "metrics", "recovery", "rdma"} <= subjects
    assert words & subjects == set()
