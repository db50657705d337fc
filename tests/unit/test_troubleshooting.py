# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md against the code: every class of error, and only messages of ours. The
messages about the broker stand in docs/discovery.md."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from infiniswap import errors

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
DISCOVERY = (ROOT / "docs/discovery.md").read_text(encoding="utf-8").partition("### Messages")[2]


@functools.cache
def _strings() -> str:
    """Every string of the package, one a line, with … for what is filled in."""
    found = []
    for path in (ROOT / "infiniswap").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def _is_said(message: str) -> bool:
    return all(part.strip() in _strings() for part in message.split("…") if part.strip())


def _messages(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def test_every_class_of_error_has_a_section() -> None:
    sections = dict(re.findall(r"^## (\w+Error) \((\d+)\)$", TEXT, re.MULTILINE))
    classes = {
        name: str(kind.exit_code)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.InfiniswapError)
    }
    assert sections == classes


def test_messages_are_those_of_the_code() -> None:
    messages, of_broker = _messages(TEXT), _messages(DISCOVERY)
    assert len(messages) > 60
    assert len(of_broker) > 10
    assert [message for message in (*messages, *of_broker) if not _is_said(message)] == []


def test_the_check_of_messages_can_fail() -> None:
    assert not _is_said("a device named … sits there already")
