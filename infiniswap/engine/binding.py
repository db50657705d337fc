# SPDX-License-Identifier: Apache-2.0
"""What the modules of the binding share: loading it, errors, ownership of C handles."""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from infiniswap.errors import EngineError, UnavailableError

try:
    _isw: Final[Any] = importlib.import_module("infiniswap.engine._isw")
except ImportError as error:
    raise UnavailableError(
        f"the C library's binding cannot be loaded ({error})",
        where="infiniswap.engine",
        mend="Install the package (`pip install .` or `make setup` in a checkout): a copied "
        "source tree is not enough.",
    ) from error

ffi: Final[Any] = _isw.ffi
lib: Final[Any] = _isw.lib


def extension_path() -> Path:
    """Where the C extension lies."""
    return Path(_isw.__file__)


def library_version() -> str:
    """Version of the C library; the same as the package's unless the install is broken."""
    text: bytes = ffi.string(lib.isw_version())
    return text.decode()


def library_features() -> frozenset[str]:
    """What this build has: the front ends by name, and of "uring", "rdma" and "seal"."""
    mask = lib.isw_features()
    known = {
        "uring": lib.ISW_FEATURE_URING,
        "rdma": lib.ISW_FEATURE_RDMA,
        "seal": lib.ISW_FEATURE_SEAL,
    }
    found = {name for name, bit in known.items() if mask & bit}
    missing = ffi.new("char **")
    for index in itertools.count():
        kind = lib.isw_frontend_kind(index, missing)
        if kind == ffi.NULL:
            break
        if missing[0] == ffi.NULL:
            found.add(ffi.string(kind).decode())
    return frozenset(found)


def text_of(error: Any, code: int) -> str:
    text: str = ffi.string(error.text).decode(errors="replace") if error is not None else ""
    return text.rstrip(".") or os.strerror(code)


def check(result: int, what: str, error: Any = None) -> int:
    """Passes a result through, or raises EngineError for a negative one."""
    if result >= 0:
        return result
    code = -result
    raise EngineError(f"{what}: {text_of(error, code)}", code=code)


@functools.cache  # to list the fields takes longer than to read them
def _int_names(struct_type: Any) -> tuple[str, ...]:
    return tuple(
        name for name, kind in struct_type.fields if kind.type.kind not in ("array", "struct")
    )


def struct_ints(struct: Any) -> dict[str, int]:
    """The scalar fields of a C struct by name, in the header's order."""
    return {name: int(getattr(struct, name)) for name in _int_names(ffi.typeof(struct))}


def struct_arrays(struct: Any) -> dict[str, Sequence[int]]:
    """The fields of a C struct that are arrays of integers, by name."""
    fields = ffi.typeof(struct).fields
    return {
        name: ffi.unpack(getattr(struct, name), kind.type.length)
        for name, kind in fields
        if kind.type.kind == "array"
    }


class Handle:
    """Owner of one C handle: counts the calls in progress, destroys once, when none is left."""

    __slots__ = ("_calls", "_closing", "_condition", "_destroy", "_name", "_pointer")

    def __init__(self, name: str, pointer: Any, destroy: Callable[[Any], None]) -> None:
        self._name = name
        self._pointer = pointer
        self._destroy = destroy
        self._condition = threading.Condition()
        self._calls = 0
        self._closing = False

    @property
    def closed(self) -> bool:
        return self._closing

    @contextmanager
    def use(self) -> Iterator[Any]:
        with self._condition:
            if self._closing:
                raise EngineError(f"the {self._name} is closed", code=errno.EBADF)
            self._calls += 1
        try:
            yield self._pointer
        finally:
            with self._condition:
                self._calls -= 1
                if self._calls == 0:
                    self._condition.notify_all()

    def close(self) -> None:
        """Idempotent; a second caller returns only after the first has destroyed the handle."""
        with self._condition:
            first = not self._closing
            self._closing = True
            # Each call is bounded in C, so this wait is.
            self._condition.wait_for(lambda: self._calls == 0)
            if not first:
                self._condition.wait_for(lambda: self._pointer is None)
                return
            pointer = self._pointer
        try:
            self._destroy(pointer)
        finally:
            with self._condition:
                self._pointer = None
                self._condition.notify_all()


class HandleOwner:
    """Base of an object that owns one handle for as long as it lives. Also a context manager."""

    _handle: Handle | None = None

    def _use(self) -> Any:
        assert self._handle is not None
        return self._handle.use()

    def _call(self, what: str, function: Any, *args: Any) -> int:
        """Returns what `function(handle, *args)` returns; EngineError for a negative result,
        which starts with `what`."""
        with self._use() as pointer:
            return check(function(pointer, *args), what)

    def _explained(self, what: str, function: Any, *args: Any) -> int:
        """As `_call`, of a function whose last parameter takes the reason of an error."""
        error = ffi.new("struct isw_error *")
        with self._use() as pointer:
            result: int = function(pointer, *args, error)
        return check(result, what, error)

    def close(self) -> None:
        """Blocking, worker thread, idempotent."""
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None and not self._handle.closed and not sys.is_finalizing():
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self.close()
