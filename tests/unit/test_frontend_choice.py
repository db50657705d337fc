# SPDX-License-Identifier: Apache-2.0
"""Which front end a device gets, and which one it would get."""

from __future__ import annotations

from typing import Any, cast

import pytest

from infiniswap.device.frontends.base import FrontEnd
from infiniswap.device.frontends.choice import _check_of, best
from infiniswap.errors import UnavailableError

UNUSED = cast(Any, None)


def front_end(checks: list[str], *, lacks: str = "", loads: bool = False) -> FrontEnd:
    """One that notes when it is checked."""

    def check() -> None:
        checks.append("checked")
        if lacks:
            raise UnavailableError(lacks)

    return FrontEnd(name="x", check=check, make=UNUSED, clear=UNUSED, would_load=lambda: loads)


def test_a_start_checks_and_so_may_load_a_module() -> None:
    checks: list[str] = []
    _check_of(front_end(checks, loads=True), True)()
    assert checks == ["checked"]


def test_a_module_that_could_be_loaded_counts_as_there_and_is_not_loaded() -> None:
    checks: list[str] = []
    _check_of(front_end(checks, lacks="no driver", loads=True), False)()
    assert not checks


def test_without_such_a_module_both_find_the_same() -> None:
    for loads in (True, False):
        checks: list[str] = []
        with pytest.raises(UnavailableError, match="no driver"):
            _check_of(front_end(checks, lacks="no driver"), loads)()
        assert checks == ["checked"]


def test_the_first_one_that_works_is_taken() -> None:
    bad, good = front_end([], lacks="no driver"), front_end([])
    choice = best({"ublk": _check_of(bad, False), "fuse": _check_of(good, False)})
    assert (choice.frontend, choice.why) == ("fuse", "no ublk: no driver")
