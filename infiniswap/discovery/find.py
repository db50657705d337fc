# SPDX-License-Identifier: Apache-2.0
"""The donors there are, asked for once by a command. A device keeps asking: slabs/finder.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infiniswap.config import Config
from infiniswap.discovery.static import NO_DONOR_MEND, union
from infiniswap.errors import InfiniswapError, NoDonorError
from infiniswap.keys import announcement_keys
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.discovery.announcement import Announcement


@dataclass(frozen=True, slots=True)
class Found:
    """Every donor that is named or announced.

    Attributes:
        addresses: of their control API.
        announced: what the broker has, in full.
        failure: what is wrong with the broker; None: nothing, or there is none.
        notes: identities that are not unique.
        ignored: messages that did not count, by reason ...
        complaints: ... and the last of each kind in words.
    """

    addresses: tuple[HostPort, ...]
    announced: tuple[Announcement, ...] = ()
    failure: InfiniswapError | None = None
    notes: tuple[str, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    complaints: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What an administrator should know, in sentences."""
        return [*([str(self.failure)] if self.failure else []), *self.notes]

    def require(self) -> tuple[HostPort, ...]:
        """For commands that make no sense without a donor.

        Raises:
            NoDonorError: there is none.
            InfiniswapError: there may be some, if it were not for this.
        """
        if self.addresses:
            return self.addresses
        if self.failure is not None:
            raise self.failure
        raise NoDonorError("no donor is named or announced", mend=NO_DONOR_MEND)


def find(config: Config) -> Found:
    """Named donors, and those that the broker announces now. Blocking, in bounded time.

    Raises:
        ConfigError: the file of peers cannot be read.
    """
    named = config.peers()
    if config.cluster.discovery == "static":
        return Found(named)
    return asyncio.run(_ask_broker(config, named))


async def _ask_broker(config: Config, named: tuple[HostPort, ...]) -> Found:
    from random import Random

    from infiniswap.discovery import broker
    from infiniswap.discovery.directory import Directory
    from infiniswap.discovery.listener import Listener

    accepted = [keys for keys in (config.keys(), config.second_keys()) if keys is not None]
    directory = Directory(
        config.cluster.name,
        announcement_keys(accepted),
        loopback_ok=broker.address_of(config.mqtt).is_loopback,
    )
    listener = Listener(config.mqtt, config.cluster.name, directory, Random())
    failure: InfiniswapError | None = None
    try:
        await listener.once()
    except InfiniswapError as error:
        failure = error
    return Found(
        union(named, directory.addresses()),
        directory.donors(),
        failure,
        (*directory.conflicts(), *directory.clocks()),
        dict(directory.ignored),
        dict(listener.complaints),
    )
