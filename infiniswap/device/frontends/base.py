# SPDX-License-Identifier: Apache-2.0
"""What every front end is to the rest of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from infiniswap.engine.protocol import Engine


class KernelDevice(Protocol):
    """One device's connection to the kernel. All methods block; none runs on the event loop."""

    @property
    def block_device(self) -> Path | None:
        """The node in /dev; None while there is none, and always for nbd-socket."""

    @property
    def path(self) -> str:
        """What users see: the block device, or the socket of nbd-socket."""

    def attach(self, engine: Engine) -> None:
        """Makes the block device.

        When it fails, the caller calls `detach`, which takes away what stood already.

        Raises:
            InfiniswapError: the step that failed.
        """

    def repair(self) -> None:
        """After CONNECTION_LOST, and whenever events were lost: mends what can be mended.

        Raises:
            InfiniswapError: not now; to be tried again.
        """

    def detach(self) -> None:
        """Takes the block device away, then what is below it. Idempotent.

        Raises:
            ConflictError: the block device is in use; it and everything below it stays.
        """
