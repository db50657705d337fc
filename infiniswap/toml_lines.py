# SPDX-License-Identifier: Apache-2.0
"""On which line of a TOML file each key stands, and changing keys without touching other lines: the
standard library's parser does neither."""

from __future__ import annotations

import contextlib
import copy
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER: Final = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$")
_ARRAY_HEADER: Final = re.compile(rf"\s*\[\[\s*({_DOTTED})\s*\]\]\s*(?:#.*)?$")
_KEY: Final = re.compile(rf"\s*({_DOTTED})\s*=")
_LONG_TEXT: Final = re.compile(r'"""|' + "'''")


def key_lines(text: str) -> dict[str, int]:
    """Line numbers, from 1, by `section` and `section.key`; of valid TOML. The tables of an array
    (`[[jobs]]`) are `jobs.0`, `jobs.1` and so on.

    A key inside of an inline table is not listed, its table is.
    """
    found: dict[str, int] = {}
    arrays: Counter[str] = Counter()
    section, fence = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if not fence:
            if match := _HEADER.match(line):
                section = _plain(match[1])
                found.setdefault(section, number)
            elif match := _ARRAY_HEADER.match(line):
                name = _plain(match[1])
                section = f"{name}.{arrays[name]}"
                arrays[name] += 1
                found.setdefault(name, number)
                found.setdefault(section, number)
            elif match := _KEY.match(line):
                key = _plain(match[1])
                found.setdefault(f"{section}.{key}" if section else key, number)
                if not section and "." in key:
                    found.setdefault(key.partition(".")[0], number)
        for mark in _LONG_TEXT.findall(line):
            fence = mark if not fence else "" if mark == fence else fence
    return found


def _plain(dotted: str) -> str:
    return ".".join(part.strip("\"'") for part in re.findall(_PART, dotted))


def with_keys(text: str, values: Mapping[str, str | None]) -> str:
    """Valid TOML with other values of some keys; every other line stays, comments included.

    Args:
        text: the file.
        values: by `section.key`, as TOML; None takes the key away.

    Raises:
        ValueError: a key is written in a way that cannot be changed line by line (an inline table,
            a comment inside of its value).
    """
    wanted = tomllib.loads(text)
    lines = text.splitlines()
    for key, value in values.items():
        section, _, name = key.partition(".")
        if _expect(wanted, section, name, value):
            _change(lines, key, value)
    result = "".join(f"{line}\n" for line in lines)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if _without_empty(tomllib.loads(result)) == _without_empty(wanted):
            return result
    raise ValueError("its keys cannot be changed line by line")


def _expect(table: dict[str, Any], section: str, name: str, value: str | None) -> bool:
    """Returns whether that is a change: the line of a value that stays may have a comment."""
    part = table.get(section, {})
    if not isinstance(part, dict):
        raise ValueError(f"{section} is no table")
    before = part.get(name)
    if value is None:
        part.pop(name, None)
        return before is not None
    after = tomllib.loads(f"value = {value}")["value"]
    table.setdefault(section, {})[name] = after
    return type(before) is not type(after) or before != after


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in copy.deepcopy(table).items() if value != {}}


def _change(lines: list[str], key: str, value: str | None) -> None:
    """In place. What comes of a file that this does not understand, `with_keys` refuses."""
    section, _, name = key.partition(".")
    where = key_lines("\n".join(lines))
    if key in where:
        at = where[key] - 1
        left = lines[at].partition("=")[0]
        lines[at : at + _span(lines, at)] = [] if value is None else [f"{left.rstrip()} = {value}"]
    elif value is not None and section in where:
        lines.insert(_place(lines, where[section], name), f"{name} = {value}")
    elif value is not None:
        lines += ["", f"[{section}]", f"{name} = {value}"]


def _span(lines: list[str], at: int) -> int:
    """Lines of the key that stands at a line. Raises ValueError: a comment would be lost."""
    for count in range(1, len(lines) - at + 1):
        own = "\n".join(lines[at : at + count])
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(own)
            break
    else:
        return 1
    if "#" in own and "#" not in str(value):
        raise ValueError(f"there is a comment beside a value that has to change: {lines[at]!a}")
    return count


def _place(lines: list[str], begin: int, name: str) -> int:
    """Below the comment that shows the key's default, or else right below the section's line."""
    for at in range(begin, len(lines)):
        if _HEADER.match(lines[at]):
            break
        if lines[at].startswith(f"#{name} = "):
            return at + 1
    return begin
