# SPDX-License-Identifier: Apache-2.0
"""The finished cells of an output directory, one line of JSON each: a run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infiniswap.errors import from_oserror
from isw_bench.apps.plan import Cell

_FIELDS = frozenset(("job", "share", "rival", "round"))


class Ledger:
    """Appends to a file, and finds what is there.

    Args:
        path: of the file.
        identities: by job, what a line must carry to count: settings and commit.
    """

    def __init__(self, path: Path, identities: Mapping[str, Mapping[str, Any]]) -> None:
        self._path = path
        self._identities = identities

    def load(self) -> dict[Cell, dict[str, Any]]:
        """Results that count, by cell. A line that a killed run has torn is left out.

        Raises:
            NotPermittedError, SystemCallError: the file cannot be read.
        """
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise from_oserror("cannot read the results", error, where=str(self._path)) from error
        found = {}
        for line in text.splitlines():
            try:
                data = json.loads(line)
                cell = Cell(**{name: data["cell"][name] for name in _FIELDS})
                if data["identity"] == self._identities.get(cell.job):
                    found[cell] = data["result"]
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def append(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Adds a finished cell; it is on the disk when this returns.

        Raises:
            NotPermittedError, SystemCallError: it cannot be written.
        """
        data = {"cell": asdict(cell), "identity": self._identities[cell.job], "result": result}
        try:
            with self._path.open("ab") as file:
                torn = file.tell() and not _ends_a_line(self._path)
                file.write(b"\n" * bool(torn) + json.dumps(data).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise from_oserror("cannot keep a result", error, where=str(self._path)) from error


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
