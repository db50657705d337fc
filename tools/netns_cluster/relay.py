# SPDX-License-Identifier: Apache-2.0
"""Joins two network interfaces and holds every frame back for a while: a delay without netem.

    python relay.py INTERFACE INTERFACE MILLISECONDS

Prints "ready" when frames pass, and runs until it is killed. Frames come and go with their
virtio header (PACKET_VNET_HDR), so that the kernel's segmentation and checksum offloads stay on and
64 KiB of a stream are one frame. What does not fit the bounds is dropped, as a router does. The
kernel's timer for it counts whole milliseconds, and so do delays.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23  # Linux 4.20
_PACKET_MR_PROMISC = 1
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33

_FRAME_BYTES_MAX = 128 << 10
_SOCKET_BYTES = 8 << 20
_HELD_BYTES_MAX = 32 << 20
_BATCH = 64
"""Frames taken from one side before the other gets its turn."""


class Direction:
    """Frames on their way from one interface to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0

    def take(self) -> None:
        """Reads what has come."""
        for _ in range(_BATCH):
            try:
                frame = self._source.recv(_FRAME_BYTES_MAX)
            except OSError:  # nothing left, or the cable was pulled: then frames vanish
                return
            if self._held_bytes + len(frame) <= _HELD_BYTES_MAX:
                self._held.append((time.monotonic() + self._delay_s, frame))
                self._held_bytes += len(frame)

    def pass_on(self, now_s: float) -> float | None:
        """Sends what is due; returns when the next one is, None when none is held."""
        while self._held and self._held[0][0] <= now_s:
            _, frame = self._held.popleft()
            self._held_bytes -= len(frame)
            try:
                self._target.send(frame)
            except OSError:  # the queue is full or the cable is cut
                continue
        return self._held[0][0] if self._held else None


def open_interface(name: str) -> socket.socket:
    """A socket that gets every frame that comes in there."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    raw.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    raw.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SOCKET_BYTES)
    raw.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _SOCKET_BYTES)
    raw.bind((name, _ETH_P_ALL))
    member = struct.pack("iHH8s", socket.if_nametoindex(name), _PACKET_MR_PROMISC, 0, b"")
    raw.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, member)
    raw.setblocking(False)
    return raw


def main(first: str, second: str, delay_ms: str) -> None:
    """Runs until killed."""
    one, other = open_interface(first), open_interface(second)
    delay_s = float(delay_ms) / 1000
    ways = {
        one.fileno(): Direction(one, other, delay_s),
        other.fileno(): Direction(other, one, delay_s),
    }
    poll = select.epoll()
    for descriptor in ways:
        poll.register(descriptor, select.EPOLLIN)
    print("ready", flush=True)
    timeout_s: float | None = None
    while True:
        for descriptor, _ in poll.poll(timeout_s):
            ways[descriptor].take()
        now_s = time.monotonic()
        dues = [due for way in ways.values() if (due := way.pass_on(now_s)) is not None]
        timeout_s = max(0.0, min(dues) - time.monotonic()) if dues else None


if __name__ == "__main__":
    main(*sys.argv[1:])
