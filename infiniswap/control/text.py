# SPDX-License-Identifier: Apache-2.0
"""Text from peers: cleaned where it enters, so that later code can print it.

A peer's text ends up on terminals of root, in log lines, labels of metrics and JSON. There a
control character moves the cursor or rings, a line break forges a line, and a direction mark
reverses the text after it. Code that decodes text from outside (a peer, a broker, a device of
another user) passes it through here.

Pure: no I/O.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from msgspec import Struct, structs

TEXT_LENGTH_MAX: Final = 512
"""Of a sentence."""
VALUE_LENGTH_MAX: Final = 4096
"""Of any other text: no path is longer."""

ValueT = TypeVar("ValueT")


def printable(text: str) -> str:
    """The text with what cannot be printed replaced. What is decoded from a peer is so already;
    tables of such text do not rely on that."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def clean_text(text: str, length_max: int = TEXT_LENGTH_MAX) -> str:
    """The text with what cannot be printed replaced, cut to length."""
    return printable(text[:length_max])


def clean_name(text: str, otherwise: str) -> str:
    """The text as a Name of the control API: cleaned, cut to length; `otherwise` when empty."""
    return clean_text(text, 128) or otherwise


def is_plain(data: bytes | str) -> bool:
    """Whether no text in this JSON needs cleaning. Cheap, and false for some that do not."""
    if isinstance(data, bytes):
        return b"\\" not in data and data.isascii() and data.decode("ascii").isprintable()
    return "\\" not in data and data.isprintable()


def cleaned(value: ValueT) -> ValueT:
    """What was decoded, with every text in it cleaned."""
    clean: Any = _cleaned(value)
    result: ValueT = clean
    return result


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return clean_text(value, VALUE_LENGTH_MAX)
        case Struct():
            fields = {name: _cleaned(getattr(value, name)) for name in value.__struct_fields__}
            return structs.replace(value, **fields)
        case dict():
            return {_cleaned(key): _cleaned(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(_cleaned, value))
        case _:
            return value
