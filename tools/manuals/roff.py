# SPDX-License-Identifier: Apache-2.0
"""Markdown to roff with the macros of man(7): as much of it as our documents use."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

_COLUMNS = 78
_ESCAPES = {"\\": "\\e", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
_CODE_ESCAPES = {**_ESCAPES, "-": "\\-", "'": "\\(aq"}
_REFERENCE = re.compile(r"\b((?:infiniswap|systemd|systemctl|cgroups)[\w@.-]*)\((\d)\)")


def escape(text: str, *, code: bool = False) -> str:
    """Text as roff prints it; `code`: with hyphens and quotes that can be copied into a shell."""
    table = _CODE_ESCAPES if code else _ESCAPES
    return "".join(table.get(c, c if c.isascii() else f"\\[u{ord(c):04X}]") for c in text)


def bold(text: str) -> str:
    """As it is typed."""
    return f"\\fB{escape(text, code=True)}\\fR"


def italic(text: str) -> str:
    """What stands for something else."""
    return f"\\fI{escape(text, code=True)}\\fR"


def fill(text: str) -> list[str]:
    """Lines of a paragraph, none of which roff takes for a request."""
    lines = textwrap.wrap(
        " ".join(text.split()), _COLUMNS, break_long_words=False, break_on_hyphens=False
    )
    return [guard(line) for line in lines]


def guard(line: str) -> str:
    """A line of text that must not become a request."""
    return f"\\&{line}" if line[:1] in (".", "'") else line


def verbatim(text: str) -> list[str]:
    """A block of code."""
    lines = [guard(escape(line, code=True)) for line in text.rstrip("\n").split("\n")]
    return [".PP", ".RS 4", ".EX", *lines, ".EE", ".RE"]


def render(markdown: str) -> list[str]:
    """Lines of roff. Headings of level 2 are sections, deeper ones subsections; comments and the
    heading of level 1 are left out."""
    tree = SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(markdown))
    return [line for node in tree.children for line in _block(node)]


def _block(node: SyntaxTreeNode) -> Iterator[str]:
    if node.type == "heading":
        if node.tag == "h2":
            yield f".SH {_inline(node.children[0]).upper()}"
        elif node.tag != "h1":
            yield f".SS {_inline(node.children[0])}"
    elif node.type == "paragraph":
        yield ".PP"
        yield from fill(_inline(node.children[0]))
    elif node.type in ("fence", "code_block"):
        yield from verbatim(node.content)
    elif node.type in ("bullet_list", "ordered_list"):
        for number, item in enumerate(node.children, start=1):
            mark = f"{number}. 4" if node.type == "ordered_list" else "\\(bu 2"
            yield from _item(item, f".IP {mark}")
    elif node.type == "table":
        yield from _table(node)
    elif node.type != "html_block":
        raise ValueError(f"no roff for {node.type} (line {(node.map or (0,))[0]})")


def _item(node: SyntaxTreeNode, request: str) -> Iterator[str]:
    lines = [line for child in node.children for line in _block(child)]
    assert lines[0] == ".PP", "a list item begins with text"
    yield request
    yield from lines[1:]


def _table(node: SyntaxTreeNode) -> Iterator[str]:
    """Each row as a term and what is said of it; a second column `default` goes beside the term."""
    rows = [
        [_inline(cell.children[0]) if cell.children else "" for cell in row.children]
        for part in node.children
        for row in part.children
    ]
    head, *body = rows
    for cells in body:
        term, *rest = cells
        if len(head) == 3 and head[1] == "default":
            term += f" (default: {rest[0]})" if rest[0] else ""
            rest = rest[1:]
        yield from tagged(term or "\\ ", ": ".join(filter(None, rest)))


def tagged(term: str, text: str) -> list[str]:
    """A term, and indented below it what is said of it. Both are roff already."""
    return [".TP", guard(term), *(fill(text) or ["\\&"])]


def _inline(node: SyntaxTreeNode) -> str:
    if node.type == "text":
        return _text(node.content)
    if node.type == "code_inline":
        return bold(node.content)
    if node.type in ("softbreak", "hardbreak"):
        return " "
    if node.type == "html_inline":
        return ""
    inner = "".join(_inline(child) for child in node.children)
    if node.type == "strong":
        return f"\\fB{inner}\\fR"
    if node.type == "em":
        return f"\\fI{inner}\\fR"
    if node.type == "link":
        target = str(node.attrs.get("href", ""))
        return f"{inner} <{escape(target, code=True)}>" if "://" in target else inner
    if node.type == "inline":
        return inner
    raise ValueError(f"no roff for {node.type}")


def _text(text: str) -> str:
    """With references to other pages in bold, as usual."""
    parts = _REFERENCE.split(text)
    done: Sequence[str] = [
        bold(part) if kind == 1 else f"({part})" if kind == 2 else escape(part)
        for part, kind in zip(parts, (i % 3 for i in range(len(parts))), strict=True)
    ]
    return "".join(done)
