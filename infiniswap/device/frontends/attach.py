# SPDX-License-Identifier: Apache-2.0
"""Connects the engine to the kernel and takes it off again: front end, link, swap.

Attaching undoes itself when a step fails. Detaching goes strictly backwards - swapoff, verify,
block device, what is below it - and stops where something is still in use: the process then goes on
serving. All of it blocks; none of it runs on the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infiniswap.device import frontends
from infiniswap.device.frontends import in_use
from infiniswap.device.frontends.base import KernelDevice
from infiniswap.device.frontends.choice import Choice
from infiniswap.device.spec.rundir import LINK_DIR, DevicePaths, remove_link
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.directories import make_directory
from infiniswap.engine.protocol import Engine
from infiniswap.errors import MemoryLimitError, SystemCallError
from infiniswap.system import swap

_SWAPOFF_S_MAX = 3600.0


@dataclass(slots=True)
class Attachment:
    """The attached parts of a device. Each field is set when its step is done.

    Attributes:
        priority: of the swap area while it is active.
    """

    spec: DeviceSpec
    paths: DevicePaths
    choice: Choice
    kernel: KernelDevice = field(init=False)
    link: Path | None = None
    swap_active: bool = False
    priority: int | None = None
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kernel = frontends.FRONT_ENDS[self.choice.frontend].make(self.paths)

    @property
    def path(self) -> str:
        """The block device, or the socket of nbd-socket."""
        return self.kernel.path

    def attach_device(self, engine: Engine) -> None:
        """Front end and link. On failure nothing stays attached.

        Raises:
            InfiniswapError: the step that failed.
        """
        try:
            frontends.clear_leftovers(self.paths)
            self.kernel.attach(engine)
            self.make_link()
        except BaseException:
            self.detach_device()
            raise

    def take_over_device(self, descriptors: Mapping[str, int]) -> None:
        """Takes over what a predecessor has attached, as it is.

        Raises:
            NotFoundError: nothing of it is left.
            InfiniswapError: the step that failed; everything stays for another try.
        """
        self.kernel.take_over(descriptors)
        device = self.kernel.block_device
        if device is None:
            return
        link = LINK_DIR / self.spec.name
        if link.is_symlink():
            self.link = link
        self.follow_swap()

    def make_link(self) -> None:
        """A link of the device's name to its block device, in place of one that leads elsewhere."""
        device = self.kernel.block_device
        if device is None:
            return
        link, self.link = LINK_DIR / self.spec.name, None
        try:
            make_directory(LINK_DIR, 0o755)
            link.unlink(missing_ok=True)
            link.symlink_to(device)
        except OSError as error:
            self.warnings.append(f"no link {link}: {error.strerror}")
            return
        self.link = link

    def attach_swap(self) -> None:
        """mkswap and swapon, above every active area unless a priority was given.

        Raises:
            ConflictError, SystemCallError: the kernel's refusal. Nothing is active then.
        """
        path = self.kernel.block_device
        assert path is not None
        swap.mkswap(path, label=f"{swap.SWAP_LABEL_PREFIX}{self.spec.name}"[: swap.LABEL_CHARS_MAX])
        priority = self.spec.config.device.priority
        if priority is None:
            priority = swap.priority_above(swap.active_areas())
        swap.swapon(path, priority=priority, discard=True)
        self.swap_active = True
        self.priority = priority

    def _device(self) -> Path | None:
        """The block device; None when there is none, or somebody has detached it: its number may
        then belong to somebody else's device."""
        return self.kernel.block_device if self.kernel.is_ours() else None

    def swap_used_bytes(self) -> int:
        """Bytes swapped out to the device now."""
        path = self._device()
        return swap.used_bytes(path) if self.swap_active and path is not None else 0

    def follow_swap(self) -> None:
        """Looks whether the swap area is active: an administrator may take it off and put it back.

        Raises:
            NotPermittedError, SystemCallError: /proc could not be read.
        """
        path = self._device()
        # By its name alone: nobody else's swap file is opened.
        area = next((area for area in swap.active_areas() if area.path == str(path)), None)
        self.swap_active = area is not None
        self.priority = None if area is None else area.priority

    def link_leads_here(self) -> bool:
        """Whether the link is as we made it; True also when none could be made."""
        try:
            return self.link is None or os.readlink(self.link) == self.path
        except OSError:
            return False

    def detach_swap(self) -> None:
        """swapoff in a child process, while this one serves the pages that come back.

        Raises:
            MemoryLimitError: they would not fit into memory; nothing was done.
            InfiniswapError: the kernel refused; the area is still active.
        """
        path = self._device()
        if not self.spec.swap or path is None:
            return
        if swap.find_area(path) is not None:  # an administrator may have taken it off, or put it on
            with swap.leaving(path):
                fit = swap.swapoff_fits(path)
                if not fit.fits:
                    raise MemoryLimitError(
                        f"what is swapped out does not fit back into memory: {fit.reason}",
                        where=f"device {self.spec.name}",
                        mend="End the programs that use it, or raise the limit, and stop it again.",
                    )
                swap.swapoff(path, timeout_s=_SWAPOFF_S_MAX)
        if swap.find_area(path) is not None:
            raise SystemCallError("the area is still active after swapoff", where=str(path))
        self.swap_active = False
        self.priority = None

    def check_unused(self, *, removes: bool) -> None:
        """Refuses to detach a device that somebody has mounted, has open, or uses as swap.

        Args:
            removes: its contents are not kept.

        Raises:
            ConflictError: who uses it.
        """
        path = self._device()
        if path is not None:
            in_use.check_unused(path, self.spec, removes=removes)

    def withdraw_link(self) -> None:
        """Removes the link of the device's name."""
        if self.link is not None:
            remove_link(self.spec.name)
            self.link = None

    def detach_device(self) -> None:
        """Block device, link, and what is below it.

        Raises:
            ConflictError: the block device is in use; everything stays.
        """
        self.kernel.detach()
        self.withdraw_link()
