# SPDX-License-Identifier: Apache-2.0
"""tools/lines: which lines count, and under which room and kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PYTHON = '''#!/usr/bin/env python3
# A comment alone.
"""A docstring counts:

its blank lines do not.
"""

VALUES = [  # a comment behind code
    # a comment alone, within brackets
    "# not a comment",
]
'''
C = """/* A comment
 * alone. */
#include <x.h>

int a; /* behind code,
        * and on */ int b;
// alone
const char *c = "/* no comment"; // behind
char d = '"'; /* alone? no */
"""


def counted(tree: Path, project_root: Path) -> dict[str, int]:
    """What tools/lines prints of a tree: room or kind to lines."""
    command = [sys.executable, str(project_root / "tools/lines"), str(tree)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return {name: int(count) for count, name in (row.split(None, 1) for row in text.splitlines())}


def test_lines_of_code_and_docstrings_count(tmp_path: Path, project_root: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=60)
    for name, source in {
        "infiniswap/a.py": PYTHON,
        "infiniswap/cli/b.py": "x = 1\n",
        "csrc/util/c.c": C,
        "csrc/util/c.h": "int c;\n",
        "tools/command": PYTHON,
        "tools/notes": "text\n",
        "tests/c/d.c": "int d;",
        "docs/e.py": "x = 1\n",
        "infiniswap/made.py": "x = 1\n",
        ".gitignore": "made.py\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    assert counted(tmp_path, project_root) == {
        "csrc/util": 6,
        "infiniswap": 6,
        "infiniswap/cli": 1,
        "tests/c": 1,
        "tools": 6,
        "all of product": 13,
        "all of tests": 1,
        "all of tools": 6,
    }
