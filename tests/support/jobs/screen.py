# SPDX-License-Identifier: Apache-2.0
"""The screen of a terminal, as far as `infiniswap run` and simple jobs use one."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b(?:\[([0-9;]*)([A-Za-z])|([D78]))|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """Rows of characters, a cursor, and a scroll region.

    Attributes:
        lines: rows from the top.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.lines = [" " * columns for _ in range(rows)]
        self._columns = columns
        self._row = self._column = 0
        self._saved = (0, 0)
        self._top, self._bottom = 0, rows - 1

    def write(self, text: str) -> None:
        """Takes what a program has written; refuses what it does not know."""
        position = 0
        while position < len(text):
            match = _PART.match(text, position)
            assert match, text[position : position + 20]
            position = match.end()
            numbers, letter, escape, control, plain = match.groups()
            if plain:
                self._print(plain)
            elif control:
                self._column = 0 if control == "\r" else self._column
                self._down() if control == "\n" else None
            elif escape:
                self._escape(escape)
            else:
                self._sequence(letter, [int(part) for part in numbers.split(";") if part])

    def _print(self, text: str) -> None:
        for char in text:
            if self._column == self._columns:  # only now does the cursor leave the row
                self._column = 0
                self._down()
            line = self.lines[self._row]
            self.lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        if self._row == self._bottom:
            self.lines[self._top : self._bottom + 1] = [
                *self.lines[self._top + 1 : self._bottom + 1],
                " " * self._columns,
            ]
        elif self._row < len(self.lines) - 1:
            self._row += 1

    def _escape(self, letter: str) -> None:
        if letter == "D":
            self._down()
        elif letter == "7":
            self._saved = (self._row, self._column)
        else:
            self._row, self._column = self._saved

    def _sequence(self, letter: str, numbers: list[int]) -> None:
        if letter == "A":
            self._row = max(self._top, self._row - 1)
        elif letter == "H":
            self._row, self._column = (number - 1 for number in numbers)
        elif letter == "K":
            self.lines[self._row] = self.lines[self._row][: self._column].ljust(self._columns)
        elif letter == "r":
            self._top, self._bottom = (
                (numbers[0] - 1, numbers[1] - 1) if numbers else (0, len(self.lines) - 1)
            )
            self._row = self._column = 0
        else:
            assert letter == "m", letter
