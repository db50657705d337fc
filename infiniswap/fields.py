# SPDX-License-Identifier: Apache-2.0
"""Bounded fields of messages and records. Numbers stay below 2^53: every JSON implementation keeps
those exact.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

SLOTS_MAX: Final = 16_384
"""Most slots of a lease; keeps the longest message (every slot listed) below its limit."""

U53: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Slot: TypeAlias = Annotated[int, Meta(ge=0, lt=SLOTS_MAX)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]
Uuid: TypeAlias = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
]
Hex128: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Hex256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Proof: TypeAlias = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""HMAC-SHA256 in hex; empty: its author has no secret."""
Name: TypeAlias = Annotated[
    str,
    Meta(
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+\Z",
    ),
]
"""For tables and log lines, which it must not be able to forge: no control characters, no line or
paragraph separators, nothing that turns the direction of what follows."""
Text: TypeAlias = Annotated[str, Meta(max_length=512)]
Label: TypeAlias = Annotated[str, Meta(max_length=128)]
"""What a peer calls something; may be empty. It is cleaned where it enters (control/text.py)."""
Versions: TypeAlias = Annotated[
    list[Annotated[int, Meta(ge=0, le=65_535)]], Meta(min_length=1, max_length=16)
]

LABEL_LENGTH_MAX: Final = 64
"""Characters of a label of ours: a job, a user, a tenant."""


def is_label(text: str) -> bool:
    """Whether somebody may call a tenant so; empty: nobody has called it anything."""
    return len(text) <= LABEL_LENGTH_MAX and text.isprintable() and text == text.strip()
