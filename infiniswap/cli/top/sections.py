# SPDX-License-Identifier: Apache-2.0
"""The four tables: columns that know how dear they are, and rows cut to a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from infiniswap.control.text import printable

_GAP: Final = 2
_TITLE_LINES: Final = 1
_NARROWEST: Final = 6
"""Cells that a column of text keeps when it is cut."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        heading: in the first line.
        cells: one text a row, of others' text too.
        worth: the column with the least worth goes first where the window is narrow; 0: it stays.
        is_number: to the right, and never cut.
    """

    heading: str
    cells: Sequence[str]
    worth: int = 0
    is_number: bool = False

    @property
    def width(self) -> int:
        """Cells of a terminal that it wants."""
        return max(map(cell_len, (self.heading, *map(printable, self.cells))))


@dataclass(frozen=True, slots=True)
class Section:
    """One table.

    Attributes:
        title: what it lists.
        columns: all with as many cells.
        styles: of each row.
        empty: said where there is no row.
    """

    title: str
    columns: Sequence[Column]
    styles: Sequence[str]
    empty: str

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.styles)

    @property
    def lines_max(self) -> int:
        """How many lines it fills when it has room."""
        return _TITLE_LINES + max(1, self.rows)

    def lines(self, columns: int, height: int, first: int = 0) -> list[Text]:
        """The section in a window.

        Args:
            columns: cells of a line.
            height: lines, at least 2.
            first: row to begin with.
        """
        if not self.rows:
            said = [(self.title, "bold"), (f"  {self.empty}", "dim")]
            return [Text(text, style=style, no_wrap=True) for text, style in said[:height]]
        fitting = self._fitting(columns)
        widths = _widths(fitting, columns)
        head = _line(fitting, widths, [column.heading for column in fitting], "bold")
        room = height - _TITLE_LINES
        says_more = self.rows > room > 1
        if says_more:
            room -= 1
        first = max(0, min(first, self.rows - room))
        shown = range(first, min(self.rows, first + room))
        body = [
            _line(fitting, widths, [column.cells[row] for column in fitting], self.styles[row])
            for row in shown
        ]
        if says_more:
            body.append(Text(f"  and {self.rows - len(shown)} more", style="dim"))
        return [head, *body]

    def _fitting(self, columns: int) -> list[Column]:
        fitting = list(self.columns)
        while _needed([column.width for column in fitting]) > columns:
            spare = [column for column in fitting if column.worth]
            if not spare:
                break
            fitting.remove(min(spare, key=lambda column: column.worth))
        return fitting


def _needed(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _widths(fitting: Sequence[Column], columns: int) -> list[int]:
    """What each gets: the widest text gives way first."""
    widths = [column.width for column in fitting]
    while _needed(widths) > columns:
        texts = [
            i for i, column in enumerate(fitting) if not column.is_number and widths[i] > _NARROWEST
        ]
        if not texts:
            break
        widths[max(texts, key=lambda i: widths[i])] -= 1
    return widths


def _line(
    fitting: Sequence[Column], widths: Sequence[int], cells: Sequence[str], style: str
) -> Text:
    parts = []
    for column, width, cell in zip(fitting, widths, cells, strict=True):
        text = printable(cell)
        if cell_len(text) > width:
            text = set_cell_size(text, width - 1) + "…"
        padding = " " * (width - cell_len(text))
        parts.append(padding + text if column.is_number else text + padding)
    return Text((" " * _GAP).join(parts).rstrip(), style=style, no_wrap=True)


def share_out(wanted: Sequence[int], room: int, least: int = 2) -> list[int]:
    """Lines for each section: all that it wants, or its part of what there is.

    Args:
        wanted: lines of each.
        room: lines in all.
        least: what each gets before another gets more.
    """
    given = [min(want, least) for want in wanted]
    left = room - sum(given)
    while left > 0:
        hungry = [i for i, want in enumerate(wanted) if given[i] < want]
        if not hungry:
            break
        given[min(hungry, key=lambda i: given[i])] += 1
        left -= 1
    return given
