# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs (mkdocs.yml): manual pages are whole, and what lies outside docs/ is no link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from infiniswap import __version__
from infiniswap.control import openapi
from manuals.pages import Page, pages

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:[A-Z]\w*\.md|changes\.d/)[^)]*\)")
_made: dict[str, Page] = {}


def on_config(config: Any) -> Any:
    """Makes the manual pages, and puts them first in the reference."""
    _made.clear()
    _made.update({f"man/{page.name}.{page.section}.md": page for page in pages()})
    manual = [{f"{page.name}({page.section})": path} for path, page in _made.items()]
    (reference,) = [part["Reference"] for part in config.nav if "Reference" in part]
    reference[:0] = sorted(manual, key=lambda item: next(iter(item)).rpartition("(")[::-1])
    return config


def _paths() -> Iterator[str]:
    """A table of the control API's paths."""
    yield "| path | | what |\n| --- | --- | --- |\n"
    for path, methods in openapi.document(__version__)["paths"].items():
        for method, operation in methods.items():
            yield f"| `{path}` | {method.upper()} | {operation['summary']} |\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text that is rendered."""
    manual = _made.get(page.file.src_uri)
    text = markdown if manual is None else manual.to_markdown()
    text = text.replace("<!-- paths -->\n", "".join(_paths()))
    depth = page.file.src_uri.count("/")
    return _OUTSIDE.sub(lambda m: m[1] if m[0].count("../") > depth else m[0], text)
