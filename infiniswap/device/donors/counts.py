# SPDX-License-Identifier: Apache-2.0
"""What has happened between a device and one donor, for as long as the device's process lives.

The engine counts for a remote, which ends when the donor is given up; its number may then be
another donor's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from infiniswap.engine.protocol import Engine, RemoteInfo


@dataclass(slots=True)
class LinkCounts:
    """Counts of one donor.

    Attributes:
        connections_lost: how often its connections broke, or were broken.
        reclaimed: how often the device got the same lease back after that.
        given_up: how often it did not.
        sessions_broken: control sessions that the device ended for what the donor said, by reason.
    """

    connections_lost: int = 0
    reclaimed: int = 0
    given_up: int = 0
    sessions_broken: Counter[str] = field(default_factory=Counter)
    _ended: Counter[str] = field(default_factory=Counter)  # of remotes that are gone
    _has_ended: bool = False

    def begin(self) -> None:
        """The donor has a remote, which counts from zero."""
        self._has_ended = False

    def end(self, info: RemoteInfo | None) -> None:
        """The remote is about to be destroyed, and nothing goes over it. Idempotent."""
        if not self._has_ended:
            self._ended.update(info.totals if info is not None else {})
            self._has_ended = True

    def totals(self, info: RemoteInfo | None) -> Counter[str]:
        """RemoteInfo.totals so far; `info` is of the remote that the donor has now."""
        if info is None or self._has_ended:
            return Counter(self._ended)
        return Counter(info.totals) + self._ended


def info_of(engine: Engine, remote: int | None) -> RemoteInfo | None:
    """What the engine tells of a remote; None when it has none of that number."""
    return next((info for info in engine.remotes() if info.remote == remote), None)
