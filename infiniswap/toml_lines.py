# SPDX-License-Identifier: Apache-2.0
"""On which line of a TOML file each key stands: the standard library's parser does not tell."""

from __future__ import annotations

import re
from typing import Final

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER: Final = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$")
_KEY: Final = re.compile(rf"\s*({_DOTTED})\s*=")
_LONG_TEXT: Final = re.compile(r'"""|' + "'''")


def key_lines(text: str) -> dict[str, int]:
    """Line numbers, from 1, by `section` and `section.key`; of valid TOML.

    A key inside of an inline table is not listed, its table is.
    """
    found: dict[str, int] = {}
    section, fence = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if not fence:
            if match := _HEADER.match(line):
                section = _plain(match[1])
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
