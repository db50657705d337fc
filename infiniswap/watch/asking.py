# SPDX-License-Identifier: Apache-2.0
"""Every donor asked at once for its status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from infiniswap.config import Config
from infiniswap.errors import (
    DonorBusyError,
    InfiniswapError,
    ProtocolMismatchError,
    WrongCertificateError,
    WrongSecretError,
)
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.control.client import ClientConfig
    from infiniswap.control.messages import Status

_AT_ONCE_MAX: Final = 256
"""Donors that are asked at once: each takes a connection and a handshake."""
_STATES: Final = (
    (WrongSecretError, "wrong secret"),
    (WrongCertificateError, "wrong certificate"),
    (ProtocolMismatchError, "not a donor"),
    (DonorBusyError, "busy"),
)
"""States of a donor that answered without its status."""


@dataclass(frozen=True, slots=True)
class AskedDonor:
    """A donor's answer: its status, or the reason why there is none."""

    address: HostPort
    status: Status | None
    error: str
    failure: InfiniswapError | None = None

    @property
    def state(self) -> str:
        """In two words at most."""
        if self.status is not None:
            if not self.status.draining:
                return "serving"
            return "draining" if self.status.pool.slabs_mapped else "drained"
        for kind, state in _STATES:
            if isinstance(self.failure, kind):
                return state
        return "unreachable"


def local_donor(config: Config) -> tuple[HostPort, Path] | None:
    """Address and socket of this host's daemon, where that lets every user read its status."""
    from infiniswap.control.local import local_path

    listen, run_dir = config.daemon.listen, config.daemon.run_dir
    path = None if run_dir is None else local_path(run_dir, listen)
    return (listen, path) if path is not None and os.path.exists(path) else None


async def ask(
    addresses: Iterable[HostPort],
    client: ClientConfig,
    local: tuple[HostPort, Path] | None = None,
) -> list[AskedDonor]:
    """Asks every donor; each takes no longer than `client.connect_s` seconds. Whoever has no keys,
    or keys of another daemon, asks the daemon of this host by its socket."""
    from infiniswap.control.client import fetch_status
    from infiniswap.control.local import fetch_local_status

    async def asked_one(address: HostPort) -> Status:
        path = local[1] if local is not None and local[0] == address else None
        if client.keys is not None or client.credentials is not None or path is None:
            try:
                return await fetch_status(address, client)
            except WrongSecretError:
                if path is None:
                    raise
        return await fetch_local_status(path, client.connect_s)

    at_once = asyncio.Semaphore(_AT_ONCE_MAX)

    async def one(address: HostPort) -> AskedDonor:
        try:
            async with at_once:
                return AskedDonor(address, await asked_one(address), "")
        except InfiniswapError as error:
            mend = f". {error.mend}" if error.mend else ""
            return AskedDonor(address, None, error.what + mend, error)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one(a), name=f"status of {a}") for a in addresses]
    return [task.result() for task in asked]
