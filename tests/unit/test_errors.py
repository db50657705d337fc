# SPDX-License-Identifier: Apache-2.0
"""The error hierarchy and its documented exit codes."""

from __future__ import annotations

import errno
import inspect
import re

from infiniswap import errors, rights
from infiniswap.errors import (
    InfiniswapError,
    NotPermittedError,
    SystemCallError,
    UsageError,
    from_oserror,
)


def test_the_table_in_the_docstring_is_the_code_and_each_code_has_one_meaning() -> None:
    codes = {
        name: kind.exit_code
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, InfiniswapError) and "exit_code" in vars(kind)
    }
    table = re.findall(r"^(\d+) +(\w+Error) ", errors.__doc__ or "", re.MULTILINE)
    assert {name: int(code) for code, name in table} == codes
    assert len(set(codes.values())) == len(codes)
    assert all(0 < code < 64 for code in codes.values())


def test_the_text_says_what_where_and_how_to_mend() -> None:
    error = UsageError("it is wrong.", where="--size 3", mend="Write 4096.")
    assert str(error) == "--size 3: it is wrong. Write 4096."
    assert str(InfiniswapError("it is wrong")) == "it is wrong"


def test_an_oserror_becomes_ours_and_keeps_its_number_and_file() -> None:
    error = from_oserror("cannot attach", OSError(errno.EBUSY, "busy", "/dev/loop0"))
    assert isinstance(error, SystemCallError)
    assert error.code == errno.EBUSY
    assert str(error) == "/dev/loop0: cannot attach: Device or resource busy"


def test_a_refused_permission_says_what_this_process_lacks() -> None:
    error = from_oserror("cannot attach", PermissionError(errno.EPERM, "no", b"/dev/x"))
    assert isinstance(error, NotPermittedError)
    mend = rights.mend("CAP_SYS_ADMIN")
    assert str(error) == f"/dev/x: cannot attach: Operation not permitted. {mend}"


def test_an_oserror_without_a_number_keeps_its_text() -> None:
    assert "something odd" in str(from_oserror("cannot attach", OSError("something odd")))
