# SPDX-License-Identifier: Apache-2.0
"""Donors from a list: the configuration's peers, or `--donors`."""

from __future__ import annotations

from collections.abc import Sequence

from infiniswap.errors import NoDonorError
from infiniswap.units import HostPort


class StaticDiscovery:
    """A fixed list of donors.

    Args:
        peers: control addresses; duplicates are dropped, order is kept.
    """

    def __init__(self, peers: Sequence[HostPort]) -> None:
        self._peers = tuple(dict.fromkeys(peers))

    def donors(self) -> tuple[HostPort, ...]:
        """Control addresses of every donor known now; may be empty."""
        return self._peers

    def require(self) -> tuple[HostPort, ...]:
        """As `donors`, for commands that make no sense without one.

        Raises:
            NoDonorError: there is none.
        """
        if not self._peers:
            raise NoDonorError(
                "no donor is named",
                mend="Give --donors HOST[:PORT],... or set `peers` under [cluster] in the "
                "configuration.",
            )
        return self._peers
