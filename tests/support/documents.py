# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the documents, and what the comment above each one says of it.

    <!-- run: consumer -->                      tests/system/test_doc_commands.py runs it, there
    <!-- full: consumer, needs polars dask -->  so does it in full runs, where these are installed
    <!-- on: donor -->                          the test of that document does
    <!-- not run: what this machine lacks -->   nobody does, and why

One of these stands above every block of commands (```sh). The kinds of hosts are described in
tests/system/test_doc_commands.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>[a-z ]+): (?P<mark>[^\n]+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.

    Attributes:
        path: of its document, below the root of the tree.
        line: where its comment or its fence stands, from 1.
        kind: "run", "full", "on", "not run", or another word of a comment; empty without one.
        mark: what that comment says behind the colon.
        language: such as "sh"; empty for output and drawings.
        body: its lines.
    """

    path: Path
    line: int
    kind: str
    mark: str
    language: str
    body: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.path}:{self.line}"

    @property
    def host(self) -> str:
        """Where it runs."""
        return self.mark.partition(", needs ")[0]

    @property
    def needs(self) -> list[str]:
        """Programs and modules that it uses beside those that each test has."""
        return self.mark.partition(", needs ")[2].split()


def documents() -> list[Path]:
    """Every document, below the root of the tree."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT) for path in found)


def blocks(path: Path) -> list[Block]:
    """Blocks of a document, in order."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return parse(path, text)


def parse(path: Path, text: str) -> list[Block]:
    """Blocks of a text."""
    return [
        Block(
            path=path,
            line=text.count("\n", 0, match.start()) + 1,
            kind=match["kind"] or "",
            mark=match["mark"] or "",
            language=match["language"],
            body=match["body"],
        )
        for match in _BLOCK.finditer(text)
    ]


def marked(path: Path, kind: str, mark: str) -> list[Block]:
    """Those of a document that have this comment, at least one."""
    found = [block for block in blocks(path) if (block.kind, block.mark) == (kind, mark)]
    assert found, f"{path} has no block marked <!-- {kind}: {mark} -->"
    return found
