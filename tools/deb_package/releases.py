# SPDX-License-Identifier: Apache-2.0
"""The releases of Debian that packages are made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Release:
    """One release.

    Attributes:
        number: as VERSION_ID in its /etc/os-release.
        codename: of its archive.
        python: its interpreter, as in /usr/bin/pythonVERSION.
    """

    number: str
    codename: str
    python: str


RELEASES: Final = (
    Release("12", "bookworm", "3.11"),
    Release("13", "trixie", "3.13"),
)
