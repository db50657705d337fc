# SPDX-License-Identifier: Apache-2.0
"""`make man`: writes the pages to docs/man/man*/, and removes those that have no source; writes the
scripts that complete commands, and the tables of docs/metrics.md, too."""

from __future__ import annotations

import sys

from manuals import completion, metrics
from manuals.pages import ROOT, SOURCES, PageError, pages


def main() -> int:
    """Returns the exit code."""
    try:
        made = {SOURCES / page.path: page.to_roff() for page in pages()}
    except PageError as error:
        print(f"man: {error}", file=sys.stderr)
        return 1
    scripts = {ROOT / path: completion.script(shell) for shell, path in completion.FILES.items()}
    document = ROOT / metrics.PATH
    tables = {document: metrics.with_tables(document.read_text(encoding="utf-8"))}
    for path, text in (made | scripts | tables).items():
        path.parent.mkdir(exist_ok=True, parents=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"man: wrote {path}")
    for path in SOURCES.glob("man[0-9]/*"):
        if path not in made:
            path.unlink()
            print(f"man: removed {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
