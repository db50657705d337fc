# SPDX-License-Identifier: Apache-2.0
"""The files of the page, read once at the daemon's start: an upgrade under a running daemon must
not mix two releases."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

INDEX: Final = "index.html"
_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file.

    Attributes:
        body: its bytes.
        kind: content type.
        tag: changes with the bytes, for browsers that have it already.
    """

    body: bytes
    kind: str
    tag: str


def load() -> dict[str, Asset]:
    """Every file by its name. Blocking. Empty where the installation has none."""
    found: dict[str, Asset] = {}
    directory = files("infiniswap.ui") / "static"
    if not directory.is_dir():
        return found
    for entry in directory.iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None and entry.is_file():
            body = entry.read_bytes()
            found[entry.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found
