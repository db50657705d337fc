# SPDX-License-Identifier: Apache-2.0
"""tools/check_words.py: the glossary holds on this tree, and the check finds what it is for."""

from __future__ import annotations

from pathlib import Path

import check_words as words
import pytest

GLOSSARY = """
| word | what it is | given up |
| --- | --- | --- |
| **donor** | a host that lends, `Donor` | lender, giver |
| **page** | 4 KiB | |
"""


def test_this_tree_keeps_to_its_glossary(project_root: Path) -> None:
    assert words.retired_names((project_root / words.GLOSSARY).read_text())
    assert words.check_tree(project_root) == []


def test_the_last_column_names_what_was_given_up() -> None:
    assert words.retired_names(GLOSSARY) == {"lender": "donor", "giver": "donor"}


@pytest.mark.parametrize(
    ("path", "source", "lines"),
    [
        ("infiniswap/device/link.py", "def f(lender):\n    return lender.page\n", [1, 2]),
        ("infiniswap/device/link.py", '"""A lender."""\n# lender\nx = "lender"\n', []),
        ("infiniswap/device/lender.py", "", [1]),
        (
            "csrc/engine/read.c",
            '/* a lender\n */\nint x; // giver\nint lender = "giver";\n',
            [4],
        ),
        ("csrc/giver/read.c", "int known_donors;\n", [1]),
    ],
)
def test_a_retired_name_is_found_in_code_and_paths_alone(
    path: str, source: str, lines: list[int]
) -> None:
    faults = words.check_file(Path(path), source, words.retired_names(GLOSSARY))
    assert [int(fault.split(":")[1]) for fault in faults] == lines


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (("infiniswap/a.py", "class Lease: pass"), ("infiniswap/b.py", "class Lease: pass"), True),
        (("infiniswap/a.py", "class _Own: pass"), ("infiniswap/b.py", "class _Own: pass"), False),
        (("infiniswap/a.py", "class Lease: pass"), ("csrc/b.c", "struct Lease {\n};\n"), False),
        (("csrc/a.c", "struct run {\n};\n"), ("csrc/b.c", "struct run {\n};\n"), True),
    ],
)
def test_two_classes_of_one_name_are_found(
    one: tuple[str, str], other: tuple[str, str], found: bool
) -> None:
    files = [(Path(path), source) for path, source in (one, other)]
    assert bool(list(words.check_kinds(files))) == found
