# SPDX-License-Identifier: Apache-2.0
"""Converts values of the configuration from TOML or text to the types of their fields."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infiniswap.errors import UsageError, is_utf8, not_utf8
from infiniswap.units import (
    PAGE_BYTES,
    HostPort,
    format_size,
    letter_meant,
    parse_host_port,
    parse_size,
)


def nearest(wrong: str, known: tuple[str, ...], noun: str) -> str:
    """Suggests the known word that looks most like the wrong one."""
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.0)
    return f"The nearest known {noun} is {close[0]}." if close else f"Remove the {noun}."


def convert(value: object, meta: Mapping[str, Any]) -> object:
    """Turns a TOML value, or text, into the field's type.

    Raises:
        UsageError: it is not of the kind, or out of range.
    """
    if meta.get("auto") and value == "auto":
        return None
    if isinstance(value, str | Path) and not is_utf8(str(value)):
        raise not_utf8(str(value))
    match meta["kind"]:
        case "size":
            return _convert_size(value, meta)
        case "int" | "float" as kind:
            return _convert_number(value, meta, kind)
        case "bool":
            return _convert_bool(value)
        case "choice":
            if value not in meta["choices"]:
                close = nearest(str(value), meta["choices"], "value")
                raise UsageError(f"{value!r} is none of {', '.join(meta['choices'])}", mend=close)
            return value
        case "path":
            return _convert_path(value)
        case "address" if value == "" and meta["optional"]:
            return None
        case "address":
            return _convert_address(value, meta["port"])
        case "addresses":
            return _convert_addresses(value, meta["port"])
        case _:
            if not isinstance(value, str):
                raise UsageError(f"{value!r} is not text", mend="Put it in quotes.")
            return value


def _convert_size(value: object, meta: Mapping[str, Any]) -> int:
    text = str(value).strip()
    if isinstance(value, str):
        value = parse_size(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{value!r} is not a size", mend='Write for example "512M" or 4096.')
    try:
        _check_range(value, meta, format_size)
        if value % meta["multiple"]:
            raise UsageError(
                f"{format_size(value)} is not a multiple of {format_size(meta['multiple'])}",
                mend=f"The page is {PAGE_BYTES} bytes; round it.",
            )
    except UsageError as error:
        meant = letter_meant(value, meta["high"]) if text.isdecimal() else ""
        raise UsageError(error.what, mend=meant or error.mend) from None
    return value


def _convert_number(value: object, meta: Mapping[str, Any], kind: str) -> int | float:
    noun = "a whole number" if kind == "int" else "a number"
    wrong = UsageError(f"{value!r} is not {noun}", mend=f"Write {noun}, without quotes in TOML.")
    if isinstance(value, str):
        try:
            value = int(value) if kind == "int" else float(value)
        except ValueError:
            raise wrong from None
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        raise wrong
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    _check_range(value, meta, str)
    return value if kind == "int" else float(value)


def _convert_bool(value: object) -> bool:
    if isinstance(value, str) and value in ("true", "false"):  # from the environment
        return value == "true"
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither true nor false", mend="Write true or false.")
    return value


def _check_range(value: float, meta: Mapping[str, Any], show: Any) -> None:
    low, high = meta["low"], meta["high"]
    if value < low or value > high or (meta.get("above") and value == low):
        raise UsageError(
            f"{show(value)} is out of range",
            mend=f"It must be {'above' if meta.get('above') else 'at least'} {show(low)} and at "
            f"most {show(high)}.",
        )


def _convert_path(value: object) -> Path | None:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        raise UsageError("it is not a path", mend="Put it in quotes.")
    if value and not value.startswith("/"):
        # Not quoted: it may be the secret itself, written where the name of its file belongs.
        raise UsageError("it is not an absolute path", mend="Start it with /.")
    if "\0" in value:
        raise UsageError("a path cannot contain a NUL byte", mend="Remove it.")
    return Path(value) if value else None


def _convert_address(value: object, default_port: int) -> HostPort:
    if isinstance(value, HostPort):
        return value
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not an address", mend='Write for example "10.0.0.2:9400".')
    return parse_host_port(value, default_port)


def _convert_addresses(value: object, default_port: int) -> tuple[HostPort, ...]:
    if isinstance(value, str):
        value = [item for item in value.split(",") if item.strip()]
    if not isinstance(value, list | tuple):
        raise UsageError(f"{value!r} is not a list", mend='Write for example ["10.0.0.2:9400"].')
    return tuple(dict.fromkeys(_convert_address(item, default_port) for item in value))
