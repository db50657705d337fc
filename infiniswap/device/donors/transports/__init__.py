# SPDX-License-Identifier: Apache-2.0
"""The ways for pages to travel to a donor, one module each; `choice` picks one for every donor.

A new transport is a class in `TRANSPORTS`. Only `donors` and `process` enter.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any, Final

from infiniswap.device.donors.transports.base import Transport
from infiniswap.device.donors.transports.rdma import Rdma
from infiniswap.device.donors.transports.tcp import Tcp
from infiniswap.engine.protocol import Engine, OffLoop

TRANSPORTS: Final[tuple[type[Transport], ...]] = (Rdma, Tcp)
"""Best first. The last one needs nothing but the donor, so a choice always ends there."""


def allowed(wish: str) -> tuple[type[Transport], ...]:
    """The transports that `device.transport` allows, best first."""
    return tuple(kind for kind in TRANSPORTS if wish in ("auto", kind.name))


def watches(
    wish: str, engine: Engine, blocking: OffLoop
) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
    """What those transports have to run as long as the device serves, each with a name."""
    for kind in allowed(wish):
        if (work := kind.watch(engine, blocking)) is not None:
            yield f"{kind.label} devices", work
