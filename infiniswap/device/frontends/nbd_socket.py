# SPDX-License-Identifier: Apache-2.0
"""nbd-socket: no kernel device, a Unix socket for qemu, fio, nbdcopy and tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infiniswap.device.frontends.base import Handover
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.protocol import Engine, Frontend


class NbdSocket:
    """A KernelDevice without a kernel."""

    def __init__(self, paths: DevicePaths) -> None:
        self._socket = paths.nbd_socket
        self._frontend: Frontend | None = None
        self._engine: Engine | None = None  # of a standby

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

    def is_ours(self) -> bool:
        """There is nothing that others could take."""
        return True

    def attach_again(self) -> None:
        """Never called."""

    def is_left(self) -> bool:
        """The kernel has nothing of it."""
        return False

    def handover(self) -> Handover:
        """Nothing: clients connect again."""
        return Handover()

    def prepare(self, engine: Engine, note: bytes) -> None:
        """Nothing to make."""
        del note
        self._engine = engine

    def adopt(self, descriptors: Mapping[str, int]) -> None:
        """A new socket at the old place."""
        del descriptors
        assert self._engine is not None
        self._socket.unlink(missing_ok=True)
        self.attach(self._engine)

    def rings(self) -> tuple[int, ...]:
        """There are none."""
        return ()

    def detach(self) -> None:
        """Ends the connections."""
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None
        self._socket.unlink(missing_ok=True)


def clear_leftovers(paths: DevicePaths) -> None:
    """Takes away what a killed process of this device left."""
    paths.nbd_socket.unlink(missing_ok=True)
