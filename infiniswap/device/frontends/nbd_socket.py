# SPDX-License-Identifier: Apache-2.0
"""nbd-socket: no kernel device, a Unix socket for qemu, fio, nbdcopy and tests."""

from __future__ import annotations

from pathlib import Path

from infiniswap.device.rundir import DevicePaths
from infiniswap.engine.protocol import Engine, Frontend


class NbdSocket:
    """A KernelDevice without a kernel."""

    def __init__(self, paths: DevicePaths) -> None:
        self._socket = paths.nbd_socket
        self._frontend: Frontend | None = None

    @property
    def block_device(self) -> Path | None:
        """None."""
        return None

    @property
    def path(self) -> str:
        """The socket."""
        return str(self._socket)

    def attach(self, engine: Engine) -> None:
        """Listens on the socket."""
        self._frontend = engine.frontend_nbd_socket(str(self._socket))

    def repair(self) -> None:
        """Clients come and go as they like."""

    def detach(self) -> None:
        """Ends the connections."""
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None
        self._socket.unlink(missing_ok=True)


def clear_leftovers(paths: DevicePaths) -> None:
    """Takes away what a killed process of this device left."""
    paths.nbd_socket.unlink(missing_ok=True)
