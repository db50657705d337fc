# SPDX-License-Identifier: Apache-2.0
"""What of a changed configuration a running process takes over, and what waits for its restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.config import Config
from infiniswap.errors import InfiniswapError

_DONOR_POLICY: Final = (
    "period_s",
    "memory_beta",
    "headroom_fraction",
    "evict_slabs_max",
    "evict_extra_slabs",
)
_NOT_THE_DAEMONS: Final = ("cluster.peers", "cluster.peers_file", "cluster.ask_s")

LIVE_DAEMON: Final = frozenset(
    {
        "daemon.pool",
        "daemon.headroom",
        "daemon.preallocate_slabs",
        "daemon.evict_deadline_s",
        "daemon.evict_move_s",
        "daemon.drain_move_s",
        "daemon.consumer_share_max",
        "daemon.keep_awake",
        "daemon.rdma",
        "policy.headroom_fraction",
        "policy.evict_slabs_max",
        "policy.evict_extra_slabs",
    }
)
"""Keys that a running daemon takes over. Of what concerns it, the others wait for its restart."""


LIVE_DEVICE: Final = frozenset(
    {
        "device.refill_pages_per_s",
        "device.connect_ms",
        "device.request_ms",
        "device.keep_awake",
        "cluster.peers",
        "policy.period_s",
        "policy.activity_alpha",
        "policy.hot_pages_per_s",
        "policy.choices",
        "policy.suspend_s",
    }
)
"""Keys that a running device takes over; connect_ms and request_ms for its next connections."""


def concerns_device(key: str) -> bool:
    """Whether a device goes by this key."""
    section, _, name = key.partition(".")
    if section == "policy":
        return key in LIVE_DEVICE
    if section == "cluster":
        return not name.startswith("heartbeat")
    return section in ("device", "mqtt")


def concerns_daemon(key: str) -> bool:
    """Whether a daemon goes by this key."""
    section, _, name = key.partition(".")
    if section == "policy":
        return name in _DONOR_POLICY
    return section in ("daemon", "cluster", "mqtt") and key not in _NOT_THE_DAEMONS


def values(config: Config) -> dict[str, Any]:
    """Every value by `section.key`."""
    return {
        f"{section}.{configuration.key_name(entry)}": getattr(getattr(config, section), entry.name)
        for section, kind in configuration.SECTIONS.items()
        for entry in dataclasses.fields(kind)
    }


def changed(old: Config, new: Config, concerns: Callable[[str], bool]) -> tuple[str, ...]:
    """Keys whose values differ, in the order of the classes; of those that concern somebody."""
    before, after = values(old), values(new)
    return tuple(key for key in before if before[key] != after[key] and concerns(key))


def merged(running: Config, wanted: Config, live: Collection[str]) -> Config:
    """The running configuration with those keys as they are wanted.

    Raises:
        ConfigError: the values do not go together as long as the other keys stay.
    """
    result = dataclasses.replace(
        running,
        **{
            section: dataclasses.replace(
                getattr(running, section),
                **{
                    entry.name: getattr(getattr(wanted, section), entry.name)
                    for entry in dataclasses.fields(kind)
                    if f"{section}.{configuration.key_name(entry)}" in live
                },
            )
            for section, kind in configuration.SECTIONS.items()
        },
    )
    for error in configuration.check_together(result):
        raise error
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a reload.

    Attributes:
        applied: keys that have new values now.
        waiting: keys whose new values wait for a restart.
        error: why nothing has changed at all; None: it was read.
    """

    applied: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    error: InfiniswapError | None = None

    def sentences(self, restart: str) -> list[str]:
        """For the status: what an administrator should know of it.

        Args:
            restart: what has to be done for the keys that wait.
        """
        if self.error is not None:
            return [f"the configuration was not reloaded, and nothing has changed: {self.error}"]
        if self.waiting:
            return [f"these keys have changed, and wait for {restart}: {', '.join(self.waiting)}"]
        return []
