# SPDX-License-Identifier: Apache-2.0
"""Which front end a device gets on this host, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infiniswap import rights
from infiniswap.device.frontends.base import FrontEnd
from infiniswap.device.frontends.table import FRONT_ENDS
from infiniswap.errors import InfiniswapError, NotPermittedError, UsageError


@dataclass(frozen=True, slots=True)
class Choice:
    """A front end and why it was taken."""

    frontend: str
    why: str


def choose(asked: str, swap_wanted: bool, *, loads: bool = True) -> Choice:
    """The front end to use on this host.

    Args:
        asked: a name of FRONT_ENDS, or "auto".
        swap_wanted: whether the device will be swap space.
        loads: modules of the kernel that are needed. Else one that could be loaded counts as there.

    Raises:
        UnavailableError: none works, or the one asked for does not.
        UsageError: swap on a front end that makes no block device.
        NotPermittedError: not root.
    """
    wanted = FRONT_ENDS.get(asked)
    if wanted is not None and not wanted.is_block_device:
        if swap_wanted:
            raise UsageError(
                f"the {asked} front end is no block device, so nothing can swap on it",
                mend="Leave --swap out, or use --frontend auto.",
            )
        return Choice(asked, "asked for")
    if lacking := rights.lacking("CAP_SYS_ADMIN"):
        raise NotPermittedError(
            f"a block device needs {lacking}",
            mend=f"{rights.way_to(lacking)}{'' if swap_wanted else _without_rights()}.",
        )
    if wanted is not None:
        _check_of(wanted, loads)()
        return Choice(asked, "asked for")
    return best(
        {name: _check_of(one, loads) for name, one in FRONT_ENDS.items() if one.is_block_device}
    )


def _check_of(front_end: FrontEnd, loads: bool) -> Callable[[], None]:
    if loads:
        return front_end.check

    def check() -> None:
        if not front_end.would_load():
            front_end.check()

    return check


def _without_rights() -> str:
    name = next(name for name, one in FRONT_ENDS.items() if not one.is_block_device)
    return f", or use --frontend {name}: a device without the kernel"


def best(checks: Mapping[str, Callable[[], None]]) -> Choice:
    """The first front end that this host has.

    Args:
        checks: by name, the best first; each raises what is missing.

    Raises:
        InfiniswapError: what the last one lacks, when there is none.
    """
    lacks: list[str] = []
    *others, last = checks
    for name in others:
        try:
            checks[name]()
        except InfiniswapError as error:
            lacks.append(f"no {name}: {error.what}")
        else:
            return Choice(name, "; ".join(lacks) or "the fastest, and the kernel has it")
    checks[last]()
    return Choice(last, "; ".join(lacks))
