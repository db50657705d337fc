#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that one thing has one name: the glossary of docs/architecture.md, and no class twice.

The last column of the glossary names what a thing was called before, or what somebody new would
call it. No module, class, function or variable has one of those names, in Python or in C. Public
classes of `infiniswap/` and structs of `csrc/` each have a name that no other has.

Run it from anywhere; prints each fault as `file:line: text`, exits 1 when there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

GLOSSARY = "docs/architecture.md"
SEARCHED = ("infiniswap", "csrc", "tools", "tests")
_ROW = re.compile(r"^\| \*\*(?P<word>[^*]+)\*\* \|.*\| (?P<retired>[^|]*) \|$", re.MULTILINE)
_C_SILENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_C_STRUCT = re.compile(r"^struct (\w+) \{", re.MULTILINE)

Name = tuple[str, int]
"""An identifier and its line."""


def retired_names(glossary: str) -> dict[str, str]:
    """Of each name that is not used any longer the word that is."""
    rows = [(row["word"], row["retired"]) for row in _ROW.finditer(glossary)]
    return {name: word for word, names in rows for name in re.findall(r"\w+", names)}


def python_names(source: str) -> Iterator[Name]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def c_names(source: str) -> Iterator[Name]:
    code = _C_SILENT.sub(lambda silent: "\n" * silent[0].count("\n"), source)
    for number, line in enumerate(code.splitlines(), start=1):
        yield from ((name, number) for name in re.findall(r"\w+", line))


def public_kinds(path: Path, source: str) -> Iterator[Name]:
    """Classes, or structs, that other files can see or that a reader may look for."""
    if path.suffix == ".py":
        classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        yield from ((each.name, each.lineno) for each in classes if not each.name.startswith("_"))
    else:
        for found in _C_STRUCT.finditer(source):
            yield found[1], source.count("\n", 0, found.start()) + 1


def check_file(path: Path, source: str, retired: dict[str, str]) -> Iterator[str]:
    for part in path.with_suffix("").parts:
        if part in retired:
            yield f"{path}:1: `{part}` is a name that was given up: {retired[part]}"
    names = python_names(source) if path.suffix == ".py" else c_names(source)
    for name, line in names:
        if name in retired:
            yield f"{path}:{line}: `{name}` is a name that was given up: {retired[name]}"


def check_kinds(files: Iterable[tuple[Path, str]]) -> Iterator[str]:
    first: dict[tuple[str, str], str] = {}
    for path, source in files:
        for name, line in public_kinds(path, source):
            place = f"{path}:{line}"
            known = first.setdefault((path.parts[0], name), place)
            if known != place:
                yield f"{place}: {name} is the name of another one, at {known}"


def check_tree(root: Path) -> list[str]:
    """Every fault of a source tree."""
    retired = retired_names((root / GLOSSARY).read_text())
    paths = [path for top in SEARCHED for path in sorted((root / top).rglob("*.[pch]*"))]
    sources = [
        (path.relative_to(root), path.read_text())
        for path in paths
        if path.suffix in {".py", ".c", ".h"}
    ]
    faults = [fault for path, source in sources for fault in check_file(path, source, retired)]
    product = (each for each in sources if each[0].parts[0] in {"infiniswap", "csrc"})
    return faults + list(check_kinds(product))


def main() -> int:
    faults = check_tree(Path(__file__).resolve().parent.parent)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
