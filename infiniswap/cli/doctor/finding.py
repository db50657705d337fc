# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap doctor` reports: one finding for each thing that was checked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from infiniswap.errors import InfiniswapError

OK: Final = "ok"
WARN: Final = "degraded"
MISSING: Final = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. Made by `good`, `degraded` and `missing`.

    Attributes:
        name: short and stable, for programs.
        state: "ok", "degraded" (works, with less) or "missing" (that part cannot be used).
        what: what was found.
        mend: a command or step; empty only where the state is "ok".
    """

    name: str
    state: str
    what: str
    mend: str = ""


Check = Callable[[], Iterator[Finding]]


def good(name: str, what: str) -> Finding:
    """Nothing to mend."""
    return Finding(name, OK, what)


def degraded(name: str, what: str, mend: str) -> Finding:
    """It works, with less."""
    return Finding(name, WARN, what, mend)


def missing(name: str, what: str, mend: str) -> Finding:
    """That part cannot be used."""
    return Finding(name, MISSING, what, mend)


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """The check's findings; where it fails, that is a finding itself."""
    try:
        yield from check()
    except InfiniswapError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        # A refusal that root would not get says nothing about the host.
        refused = os.geteuid() != 0 and what.endswith(os.strerror(errno.EACCES))
        yield missing(name, what, _again() if refused else error.mend or _again())
    except OSError as error:
        yield degraded(name, f"could not be checked: {error}", _again())


def _again() -> str:
    return "dmesg | tail (what the kernel says)" if os.geteuid() == 0 else "sudo infiniswap doctor"
