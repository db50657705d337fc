# SPDX-License-Identifier: Apache-2.0
"""Donors from lists: the configuration's peers or `--donors`, and a file that may change."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from infiniswap import events
from infiniswap.errors import ConfigError
from infiniswap.peers import PEERS_MAX, read_peers
from infiniswap.units import HostPort

log = logging.getLogger(__name__)

NO_DONOR_MEND: Final = (
    "Run `sudo infiniswap invite` on a host that lends memory, and here the `join` command that it "
    "prints, or give --donors HOST[:PORT],..."
)
"""With what is wrong it makes two lines of a terminal."""

_Signature = tuple[int, int, int] | None


def only_these(donors: object) -> dict[str, object]:
    """`--donors` as configuration keys, which replace all other donors; None: not given."""
    if donors is None:
        return {}
    return {"cluster.peers": donors, "cluster.peers_file": "", "cluster.discovery": "static"}


def union(*lists: Iterable[HostPort]) -> tuple[HostPort, ...]:
    """Each address once, earlier lists first, PEERS_MAX at most."""
    found = dict.fromkeys(address for addresses in lists for address in addresses)
    return tuple(found)[:PEERS_MAX]


class PeersFile:
    """A list of peers that is read again when its file changes. Not for two threads at once.

    A file that cannot be read changes nothing: the last good content stays in force.

    Attributes:
        peers: control addresses, as of the last good content.
        problem: why the file as it is now is not in force; empty when it is.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.peers: tuple[HostPort, ...] = ()
        self.problem = ""
        self._path = path
        self._read: _Signature = None
        self._seen: _Signature = None
        self._is_known = False  # whether `_read` stands for a file that was looked at

    def load(self) -> None:
        """Reads it now. Blocking.

        Raises:
            ConfigError: it cannot be read, or is no list of peers.
        """
        signature = self._signature()
        peers = read_peers(self._path)
        self.peers, self.problem = peers, ""
        self._read = self._seen = signature
        self._is_known = True

    def look(self) -> bool:
        """Reads the file again if it has changed and two looks in a row find the same. (An editor
        that writes in place leaves half a file for a moment.) Blocking; never raises.

        Returns:
            Whether `peers` or `problem` has changed.
        """
        signature = self._signature()
        if self._is_known and signature == self._read:
            self._seen = signature
            return False
        if signature != self._seen:
            self._seen = signature
            if self._is_known:
                return False
        before = self.peers, self.problem
        self._is_known, self._read = True, signature
        try:
            peers = read_peers(self._path)
        except ConfigError as error:
            problem = f"{error}".rstrip(".")
            self.problem = f"{problem}; until then the {len(self.peers)} former peers count"
            if self.problem != before[1]:
                log.warning("%s", self.problem, extra=events.about(events.PEERS_FILE))
        else:
            self.peers, self.problem = peers, ""
            if (peers, "") != before:
                log.info("%s: %d peers", self._path, len(peers))
        return (self.peers, self.problem) != before

    def _signature(self) -> _Signature:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
