# SPDX-License-Identifier: Apache-2.0
"""nbd-socket: no kernel device, a Unix socket for qemu, fio, nbdcopy and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from infiniswap.device.frontends.base import FrontEnd, KernelDevice
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.protocol import Engine, Frontend, FrontendConfig


class NbdSocket(KernelDevice):
    """A KernelDevice without a kernel. Its clients come and go as they like."""

    def __init__(self, paths: DevicePaths) -> None:
        self._socket = paths.nbd_socket
        self._frontend: Frontend | None = None
        self._engine: Engine | None = None  # of a standby

    @property
    def path(self) -> str:
        """The socket."""
        return str(self._socket)

    def attach(self, engine: Engine) -> None:
        """Listens on the socket."""
        self._frontend = engine.frontend("nbd-socket", FrontendConfig(path=str(self._socket)))

    def prepare(self, engine: Engine, note: bytes) -> None:
        """Nothing to make."""
        del note
        self._engine = engine

    def take_over(self, descriptors: Mapping[str, int]) -> None:
        """A new socket at the old place, to which clients connect again."""
        del descriptors
        assert self._engine is not None
        self._socket.unlink(missing_ok=True)
        self.attach(self._engine)

    def detach(self) -> None:
        """Ends the connections."""
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None
        self._socket.unlink(missing_ok=True)


FRONT_END: Final = FrontEnd(
    name="nbd-socket",
    check=lambda: None,
    make=NbdSocket,
    clear=lambda paths: paths.nbd_socket.unlink(missing_ok=True),
    is_block_device=False,
)
