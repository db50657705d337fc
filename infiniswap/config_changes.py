# SPDX-License-Identifier: Apache-2.0
"""A changed configuration: which keys a running process takes over, and which wait for its restart.

config.py marks the keys where it declares them. docs/configuration.md lists the live ones; a test
compares both.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from infiniswap import events
from infiniswap.config import Config, attribute, check_together, entries
from infiniswap.errors import InfiniswapError

log = logging.getLogger(__name__)

Process = Literal["daemon", "device"]

SECRETS_CHANGED: Final = "the secrets of the cluster have changed, and open sessions go on"

_RESTART: Final[Mapping[Process, str]] = {
    "daemon": "a restart of the daemon",
    "device": "a stop and a start of the device",
}
"""What makes a process read the keys that wait."""


def live_keys(process: Process) -> tuple[str, ...]:
    """Keys that a running process takes over; the other keys that concern it wait for its restart.

    A device's connect_ms and request_ms apply to its next connections.
    """
    return tuple(key for key, _, entry in entries() if _is_live(entry, process))


def _is_live(entry: dataclasses.Field[Any], process: Process) -> bool:
    return entry.metadata.get("live") in (process, "both")


def concerning_keys(process: Process) -> tuple[str, ...]:
    """Keys that a process uses."""
    other = {"daemon": "device", "device": "daemon"}[process]
    return tuple(
        key
        for key, section, entry in entries()
        if other not in (section, entry.metadata.get("only"))
    )


def _values(config: Config) -> dict[str, Any]:
    """Every value by `section.key`."""
    return {key: getattr(config.section(section), entry.name) for key, section, entry in entries()}


def changed(old: Config, new: Config, process: Process) -> tuple[str, ...]:
    """Keys that concern a process and whose values differ, in the order of the classes."""
    before, after = _values(old), _values(new)
    return tuple(key for key in concerning_keys(process) if before[key] != after[key])


def merged(running: Config, wanted: Config, process: Process) -> Config:
    """The running configuration with the wanted values of the process's live keys.

    Raises:
        ConfigError: the values do not go together as long as the other keys stay.
    """
    changes: dict[str, dict[str, Any]] = {}
    for _, section, entry in entries():
        if _is_live(entry, process):
            value = getattr(wanted.section(section), entry.name)
            changes.setdefault(section, {})[entry.name] = value
    sections = {
        attribute(section): dataclasses.replace(running.section(section), **fields)
        for section, fields in changes.items()
    }
    result: Config = dataclasses.replace(running, **sections)
    for error in check_together(result):
        raise error
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a reload.

    Attributes:
        applied: keys that have new values now.
        waiting: keys whose new values wait for a restart.
        error: why nothing has changed at all; None: it was read.
        contents: what is new of files that are named as before, each as a sentence.
    """

    applied: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    error: InfiniswapError | None = None
    contents: tuple[str, ...] = ()

    @property
    def changes(self) -> str:
        """What has changed, for people."""
        keys = [", ".join(self.applied)] if self.applied else []
        return "; ".join((*keys, *self.contents)) or "nothing has changed"

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
        if self.applied or self.contents or not (self.waiting or self.error):
            log.info("reloaded: %s", self.changes, extra=events.about(events.RELOADED))
        for sentence in self.sentences(process):
            log.log(
                logging.ERROR if self.error else logging.WARNING,
                "%s",
                sentence,
                extra=events.about(events.CONFIG_BROKEN if self.error else events.RESTART_NEEDED),
            )
