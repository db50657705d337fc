# SPDX-License-Identifier: Apache-2.0
"""Whether a device's process can run at all, known before it is asked anything."""

from __future__ import annotations

import socket

from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import ConflictError
from infiniswap.system.process import peer_credentials
from infiniswap.system.surroundings.groups import frozen_by


class FrozenError(ConflictError):
    """The device's process is kept from running: what it is asked would be done whenever it runs
    again, long after the asker has gone."""


def check_runs(paths: DevicePaths, sock: socket.socket) -> None:
    """Raises FrozenError.

    Args:
        paths: of the device.
        sock: connected to one of its sockets; the kernel answers for a process that does not run.
    """
    why, mend = frozen_by(peer_credentials(sock)[0])
    if why:
        raise FrozenError(
            f"the device process cannot answer: {why}. Programs wait for what they have on the "
            "device, and nothing takes over",
            where=f"device {paths.name}",
            mend=mend,
        )
