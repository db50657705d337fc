# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that may be anything: files, and what other processes send.

The decoder fails in three families of exceptions, one of which is easily forgotten: text that is
not UTF-8, and nesting without end, are no errors of msgspec's own. And what it says may quote what
it has read, which for a file that was named by mistake could be somebody's password.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_QUOTES_NOTHING: Final = (
    "Expected",
    "Object missing required field",
    "JSON is malformed",
    "Input data was truncated",
)
"""How msgspec's texts begin that name types, our own fields and positions only."""


class NotJsonError(ValueError):
    """It is no JSON, or not of the form that was asked for. The text quotes nothing of it."""


def decode_json(
    data: bytes, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None
) -> T:
    """The value.

    Raises:
        NotJsonError: see there.
    """
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=dec_hook)
    except msgspec.MsgspecError as error:
        text = str(error)
        why = text if text.startswith(_QUOTES_NOTHING) else "unknown value or field"
    except UnicodeError:
        why = "not UTF-8"
    except RecursionError:
        why = "nested too deeply"
    raise NotJsonError(why)
