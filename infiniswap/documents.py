# SPDX-License-Identifier: Apache-2.0
"""Where the pages of the documentation lie on this host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

_SHARE: Final = "share/doc/infiniswap"
PLACES: Final = (
    Path(__file__).resolve().parents[1] / "docs",  # a checkout
    Path(sys.prefix) / _SHARE,  # a wheel
    Path("/usr") / _SHARE,  # the Debian package
)


def page(name: str, places: tuple[Path, ...] = PLACES) -> str:
    """The path of a page, for messages; its name in the sources where this host has no pages.

    Args:
        name: such as "security.md".
        places: directories where the pages may lie, the best one first.
    """
    paths = (place / name for place in places)
    return next((str(path) for path in paths if path.is_file()), f"docs/{name} in the sources")
