# SPDX-License-Identifier: Apache-2.0
"""What every front end is to the rest of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infiniswap.engine.protocol import Engine


@dataclass(frozen=True, slots=True)
class Handover:
    """What a front end leaves its successor.

    Attributes:
        descriptors: by name (`[a-z0-9-]`, at most 23 characters); the holder keeps copies.
        note: whatever else it must know; a standby has it in its locked memory from the start.
    """

    descriptors: Mapping[str, int] = field(default_factory=dict)
    note: bytes = b""


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

    def is_ours(self) -> bool:
        """Whether `block_device` is still the one that this process serves: nobody has detached it,
        so that its number is free for others. Reads /sys alone, and is called often."""

    def attach_again(self) -> None:
        """After `is_ours` has said no: another block device over what still serves.

        Raises:
            InfiniswapError: not now, or never with this front end.
        """

    def is_left(self) -> bool:
        """After FRONTEND_DOWN: whether the kernel has the device still, so that a successor could
        take it over though this process can serve it no longer.

        Raises:
            InfiniswapError: the kernel did not say.
        """

    def handover(self) -> Handover:
        """What a successor needs of this process. Asked once, after `attach` or `adopt`.

        Raises:
            UnavailableError: nobody could take over on this host, and why.
        """

    def prepare(self, engine: Engine, note: bytes) -> None:
        """In a standby, while its predecessor serves: makes what `adopt` would need memory for.

        Args:
            engine: a standby, too.
            note: the predecessor's.

        Raises:
            InfiniswapError: this process could never take over.
        """

    def adopt(self, descriptors: Mapping[str, int]) -> None:
        """In a successor, after `prepare`: takes over what its predecessor left attached.

        Opens and reads as little as it can: what lies on this device cannot be read yet. Nothing
        is detached when it fails, as another successor may fare better. The engine serves already.

        Args:
            descriptors: copies of the predecessor's, now ours to close.

        Raises:
            NotFoundError: nothing is left that could be taken over, by anybody.
            InfiniswapError: the step that failed.
        """

    def rings(self) -> tuple[int, ...]:
        """Descriptors of io_urings by which the kernel hands requests to this process: they must
        not end with it. Asked after `attach` or `prepare`."""

    def detach(self) -> None:
        """Takes the block device away, then what is below it. Idempotent.

        Raises:
            ConflictError: the block device is in use; it and everything below it stays.
        """
