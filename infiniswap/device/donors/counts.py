# SPDX-License-Identifier: Apache-2.0
"""What has happened between a device and one donor, for as long as the device's process lives.

The engine counts for a remote, which ends when the donor is given up; its number may then be
another donor's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from infiniswap.engine.protocol import Engine, RemoteInfo


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals, in pages but for `errors`; `rdma_*` are those of the pages that went by RDMA."""

    read_pages: int = 0
    write_pages: int = 0
    rdma_read_pages: int = 0
    rdma_write_pages: int = 0
    errors: int = 0


@dataclass(slots=True)
class LinkCounts:
    """Of one donor.

    Attributes:
        connections_lost: how often its connections broke, or were broken.
        reclaimed: how often the same lease was got back after that.
        given_up: how often it was not.
        sessions_broken: control sessions that we ended for what it said in them, by reason.
    """

    connections_lost: int = 0
    reclaimed: int = 0
    given_up: int = 0
    sessions_broken: Counter[str] = field(default_factory=Counter)
    _ended: Traffic = field(default_factory=Traffic)  # of remotes that are no more
    _has_ended: bool = False

    def begin(self) -> None:
        """It has a remote, which counts from zero."""
        self._has_ended = False

    def end(self, info: RemoteInfo | None) -> None:
        """The remote is about to be destroyed, nothing goes over it any more. Idempotent."""
        if not self._has_ended:
            self._ended = self.traffic(info)
            self._has_ended = True

    def traffic(self, info: RemoteInfo | None) -> Traffic:
        """Everything so far; `info`: of the remote that it has now."""
        past = self._ended
        if info is None or self._has_ended:
            return past
        return Traffic(
            past.read_pages + info.read_pages,
            past.write_pages + info.write_pages,
            past.rdma_read_pages + info.rdma_read_pages,
            past.rdma_write_pages + info.rdma_write_pages,
            past.errors + info.errors,
        )


def info_of(engine: Engine, remote: int | None) -> RemoteInfo | None:
    """What the engine tells of a remote; None where there is none of that number."""
    return next((info for info in engine.remotes() if info.remote == remote), None)


def is_down(engine: Engine, remote: int | None) -> bool:
    """Whether its connections are lost."""
    info = info_of(engine, remote)
    return info is not None and info.state == "down"
