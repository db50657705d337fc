# SPDX-License-Identifier: Apache-2.0
"""A changed configuration: which keys a running process takes over, and which wait for its restart.

config.py marks the keys where it declares them. docs/configuration.md lists the live ones; a test
compares both.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from infiniswap import config as configuration
from infiniswap import events
from infiniswap.config import Config
from infiniswap.errors import InfiniswapError

log = logging.getLogger(__name__)

Process = Literal["daemon", "device"]

_RESTART: Final[Mapping[Process, str]] = {
    "daemon": "a restart of the daemon",
    "device": "a stop and a start of the device",
}
"""What makes a process read the keys that wait."""


def _keys(wanted: Callable[[str, Mapping[str, Any]], bool]) -> Iterator[str]:
    """Keys by section and metadata of their fields, in the order of the classes."""
    for section, kind in configuration.SECTIONS.items():
        for entry in dataclasses.fields(kind):
            if wanted(section, entry.metadata):
                yield f"{section}.{configuration.key_name(entry)}"


def live_keys(process: Process) -> tuple[str, ...]:
    """Keys that a running process takes over; the other keys that concern it wait for its restart.

    A device's connect_ms and request_ms apply to its next connections.
    """
    return tuple(_keys(lambda _, meta: meta.get("live") == process))


def concerning_keys(process: Process) -> tuple[str, ...]:
    """Keys that a process uses."""
    others = {"daemon": "device", "device": "daemon"}[process]
    return tuple(_keys(lambda section, meta: others not in (section, meta.get("only"))))


def values(config: Config) -> dict[str, Any]:
    """Every value by `section.key`."""
    return {
        f"{section}.{configuration.key_name(entry)}": getattr(getattr(config, section), entry.name)
        for section, kind in configuration.SECTIONS.items()
        for entry in dataclasses.fields(kind)
    }


def changed(old: Config, new: Config, process: Process) -> tuple[str, ...]:
    """Keys that concern a process and whose values differ, in the order of the classes."""
    before, after = values(old), values(new)
    return tuple(key for key in concerning_keys(process) if before[key] != after[key])


def merged(running: Config, wanted: Config, process: Process) -> Config:
    """The running configuration with the wanted values of the process's live keys.

    Raises:
        ConfigError: the values do not go together as long as the other keys stay.
    """
    live = live_keys(process)
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
    """The result of a reload.

    Attributes:
        applied: keys that have new values now.
        waiting: keys whose new values wait for a restart.
        error: why nothing has changed at all; None: it was read.
    """

    applied: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    error: InfiniswapError | None = None

    @classmethod
    def between(cls, running: Config, now: Config, wanted: Config, process: Process) -> Outcome:
        """The running configuration has become the one of now, which is not all that is wanted."""
        return cls(changed(running, now, process), changed(now, wanted, process))

    def sentences(self, process: Process) -> list[str]:
        """What an administrator should know of it, for the status."""
        if self.error is not None:
            return [f"the configuration was not reloaded, and nothing has changed: {self.error}"]
        if self.waiting:
            keys = ", ".join(self.waiting)
            return [f"these keys have changed, and wait for {_RESTART[process]}: {keys}"]
        return []

    def log(self, process: Process) -> None:
        """Writes it to the process's log."""
        if self.applied or not (self.waiting or self.error):
            log.info(
                "reloaded: %s",
                ", ".join(self.applied) or "nothing has changed",
                extra=events.about(events.RELOADED),
            )
        for sentence in self.sentences(process):
            log.log(
                logging.ERROR if self.error else logging.WARNING,
                "%s",
                sentence,
                extra=events.about(events.CONFIG_BROKEN if self.error else events.RESTART_NEEDED),
            )
