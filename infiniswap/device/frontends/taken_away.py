# SPDX-License-Identifier: Apache-2.0
"""A device that somebody else takes away while it serves: an administrator detaches its loop
device, whose number then goes to another file, removes its link, or takes its swap area off.
TakenAway notices, says so, and mends what it can without harm: a swap area that was taken off
stays off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping

from infiniswap import events
from infiniswap.device.frontends.attach import Attachment
from infiniswap.engine.protocol import OffLoop
from infiniswap.errors import InfiniswapError
from infiniswap.ticks import next_tick

log = logging.getLogger(__name__)

DEVICE = "block-device"
SWAP = "swap"
"""Names of the alarms."""

_PERIOD_S = 2.0
_PAUSE_S_MAX = 60.0


class TakenAway:
    """Looks at the attached device every few seconds.

    Args:
        attachment: of the device.
        alarms: the device's.
        blocking: runs what blocks.
        period_s: between two looks.
    """

    def __init__(
        self,
        attachment: Attachment,
        alarms: MutableMapping[str, str],
        blocking: OffLoop,
        *,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._attachment = attachment
        self._alarms = alarms
        self._blocking = blocking
        self._period_s = period_s
        self._pause_s = period_s

    async def run(self, stopping: asyncio.Lock, serving: Callable[[], bool]) -> None:
        """Until cancelled.

        Args:
            stopping: held by the task that stops the device.
            serving: whether everything is attached and has to stay so.
        """
        while True:
            await next_tick(self._pause_s)
            async with stopping:
                if not serving():
                    continue
                try:
                    await self._blocking(self.look)
                except InfiniswapError as error:
                    log.warning("cannot look whether the device is still attached: %s", error)

    def look(self) -> None:
        """Looks once; blocks.

        Raises:
            InfiniswapError: the kernel did not answer.
        """
        kernel, attachment = self._attachment.kernel, self._attachment
        self._pause_s = self._period_s
        if not kernel.is_ours():
            self._attach_again()
        elif not attachment.link_leads_here():
            self._put_link_back()
        if kernel.is_ours() and attachment.spec.swap:
            self._look_at_swap()

    def _attach_again(self) -> None:
        attachment = self._attachment
        was, known = attachment.path, DEVICE in self._alarms
        attachment.withdraw_link()  # it leads to nothing, or to somebody else's device
        try:
            attachment.kernel.attach_again()
        except InfiniswapError as error:
            # Each try starts a child process, so the pause grows.
            self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
            if not known:
                self._alarms[DEVICE] = f"{was} was detached by somebody else: {error}"
                log.error("%s", self._alarms[DEVICE], extra=events.about(events.DEVICE_DETACHED))
            return
        attachment.make_link()
        self._pause_s = self._period_s
        self._alarms.pop(DEVICE, None)
        log.error(
            "%s was detached by somebody else; the device is attached again, as %s",
            was,
            attachment.path,
            extra=events.about(events.DEVICE_DETACHED),
        )

    def _put_link_back(self) -> None:
        attachment = self._attachment
        attachment.make_link()
        log.warning(
            "the link to %s was removed or changed by somebody else; it %s",
            attachment.path,
            "cannot be put back" if attachment.link is None else "is put back",
            extra=events.about(events.LINK_CHANGED),
        )

    def _look_at_swap(self) -> None:
        self._attachment.follow_swap()
        if self._attachment.swap_active:
            self._alarms.pop(SWAP, None)
        elif SWAP not in self._alarms:
            self._alarms[SWAP] = "its swap area was taken out of use by somebody else (swapoff)"
            log.error("%s", self._alarms[SWAP], extra=events.about(events.SWAP_TAKEN_OFF))
