# SPDX-License-Identifier: Apache-2.0
"""The table of leases that `status` and `donor leases` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from infiniswap.control.text import printable
from infiniswap.watch.leases import ListedLease

_NUMBERS: Final = frozenset({"held", "pages/s"})
_ALWAYS_SAME: Final = {"tenant": "", "state": "active"}
"""Columns that are left out where every lease has this."""


def table(title: str, leases: Sequence[ListedLease], *, with_donor: bool) -> Any:
    """A table for rich. Text of others is never markup, and has no control characters left."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = [
        ([("donor", one.donor_name)] if with_donor else []) + list(one.cells()) for one in leases
    ]
    same = {
        heading
        for heading, text in _ALWAYS_SAME.items()
        if all(dict(row)[heading] == text for row in rows)
    }
    for row in rows[:1]:
        for heading, _ in row:
            if heading not in same:
                made.add_column(
                    heading,
                    justify="right" if heading in _NUMBERS else "left",
                    overflow="fold",
                    no_wrap=heading in _NUMBERS,
                )
    for row in rows:
        made.add_row(*(Text(printable(text)) for heading, text in row if heading not in same))
    return made
