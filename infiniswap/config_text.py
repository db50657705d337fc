# SPDX-License-Identifier: Apache-2.0
"""A commented configuration file, made from the fields in config.py and the strings below them.

The file has every key. A key without a chosen value has its default as a comment, so a later
release may change that default.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.units import HostPort, format_size

_WIDTH: Final = 96


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration.

    Attributes:
        name: `section.key`.
        default: as TOML.
        text: what it means, whole sentences.
        choices: what may be chosen, empty where anything in range may.
    """

    name: str
    default: str
    text: str
    choices: tuple[str, ...] = ()


@functools.cache
def keys() -> tuple[Key, ...]:
    """Every key, in the order of the classes."""
    texts = _texts()
    return tuple(
        Key(
            key,
            toml_value(entry.default, entry.metadata),
            texts[configuration.SECTIONS[section].__name__, entry.name],
            tuple(entry.metadata.get("choices", ())),
        )
        for key, section, entry in configuration.entries()
    )


def _texts() -> dict[tuple[str, str], str]:
    """The string below each field, by class and field. Python itself forgets them."""
    found = {}
    for node in ast.parse(inspect.getsource(configuration)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[node.name, field.target.id] = _text_of(below)
    return found


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        # Sizes are written with their unit in a file.
        return " ".join(str(node.value.value).split()).replace(", in bytes", "")
    return ""


def toml_value(value: object, meta: Mapping[str, Any]) -> str:
    """A value as it is written in a file."""
    if value is None:
        return '"auto"' if meta.get("auto") else '""'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item, {}) for item in value) + "]"
    if meta.get("kind") == "size" and isinstance(value, int):
        return f'"{format_size(value)}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | Path | HostPort):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    return str(value)


def render(
    head: Sequence[str], chosen: Mapping[str, str], found: Mapping[str, Sequence[str]]
) -> str:
    """A whole file.

    Args:
        head: lines at its top.
        chosen: values in force, as TOML, by key; the others have their default commented out.
        found: further sentences, by key or section.
    """
    lines = [f"# {line}".rstrip() for line in head]
    section = ""
    for key in keys():
        before, _, name = key.name.rpartition(".")
        if before != section:
            section = before
            title = (configuration.SECTIONS[section].__doc__ or "").partition(":")[2].strip()
            lines += ["", "", *_comment(title[:1].upper() + title[1:]), f"[{section}]"]
            for sentence in found.get(section, ()):
                lines += _comment(sentence)
        choices = f" One of: {', '.join(key.choices)}." if key.choices else ""
        lines += ["", *_comment(key.text + choices)]
        for sentence in found.get(key.name, ()):
            lines += _comment(f"Here: {sentence}")
        value = chosen.get(key.name)
        lines.append(f"{name} = {value}" if value is not None else f"#{name} = {key.default}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
