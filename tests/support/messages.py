# SPDX-License-Identifier: Apache-2.0
"""Messages of the control protocol as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

_PLAIN = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" "), min_size=1
)


def values(kind: Any, texts: st.SearchStrategy[str] = _PLAIN) -> st.SearchStrategy[Any]:
    """JSON of that type, as plain data: `texts` wherever the type does not ask for digits."""
    match kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind):
        case msgspec.inspect.Metadata(type=inner):
            return values(inner, texts)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType(ge=low, le=high, lt=end):
            return st.integers(low, end - 1 if end else high)
        case msgspec.inspect.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False, allow_infinity=False)
        case msgspec.inspect.StrType(pattern=str(pattern)) if "-[0-9a-f]" in pattern:
            return st.uuids().map(str)
        case msgspec.inspect.StrType(pattern=str(pattern)) if "0-9a-f" in pattern:
            size = 16 if "{32}" in pattern else 32
            return st.binary(min_size=size, max_size=size).map(bytes.hex)
        case msgspec.inspect.StrType(min_length=shortest, max_length=longest):
            cut = texts.map(lambda text: text[:longest])
            return cut.filter(lambda text: len(text) >= (shortest or 0))
        case msgspec.inspect.ListType(item_type=item, min_length=fewest):
            return st.lists(values(item, texts), min_size=fewest or 0, max_size=8)
        case msgspec.inspect.DictType(value_type=item):
            return st.dictionaries(texts, values(item, texts), max_size=8)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*(values(each, texts) for each in types))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.StructType(fields=fields, array_like=True):
            return st.tuples(*(values(field.type, texts) for field in fields))
        case msgspec.inspect.StructType(fields=fields, tag=tag):
            typed = {} if tag is None else {"type": st.just(tag)}
            return st.fixed_dictionaries(typed | {f.name: values(f.type, texts) for f in fields})
        case unknown:
            raise NotImplementedError(unknown)


def texts(value: Any) -> Iterator[str]:
    """Every text in plain data, keys too."""
    match value:
        case str():
            yield value
        case dict():
            yield from texts([*value.keys(), *value.values()])
        case list():
            for item in value:
                yield from texts(item)
