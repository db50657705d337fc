# SPDX-License-Identifier: Apache-2.0
"""A device process's end of the socket to its holder, and the holder's end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from infiniswap.device.succession.holder import Holder

Pair = tuple[Holder, socket.socket]


@pytest.fixture
def holder_pair() -> Iterator[Pair]:
    """The device's end, and the holder's."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    holder = Holder(ours.detach())
    yield holder, theirs
    theirs.close()
    holder.close()


def said(theirs: socket.socket) -> tuple[str, list[int]]:
    """What the device has said to its holder, with descriptors that are the caller's."""
    data, descriptors, _, _ = socket.recv_fds(theirs, 4096, 8)
    return data.decode(), descriptors
