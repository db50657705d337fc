# SPDX-License-Identifier: Apache-2.0
"""A successor's beginning: it goes on where its predecessor ended.

The engine goes on with the predecessor's state, the front end with what is attached, the links
with their leases.
"""

from __future__ import annotations

import asyncio
import os

from infiniswap.device import frontends
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.process.far import take_kept
from infiniswap.device.process.parts import Parts
from infiniswap.device.process.runs import Runs
from infiniswap.device.slabs.after_take_over import restore_links
from infiniswap.device.succession import hand_over, standby
from infiniswap.device.succession.hand_over import Left
from infiniswap.device.succession.holder import LOCK, TakeOver


def prepare(parts: Parts, state_fd: int, key_fd: int, left: Left) -> None:
    """As standby: makes everything that can be made before its turn. Blocking, without event loop.

    Args:
        parts: none is made yet.
        state_fd, key_fd: the predecessor's, of state file and key; they stay the caller's.
        left: what else the predecessor has left.

    Raises:
        InfiniswapError: this code cannot take the device over.
    """
    parts.make_client(is_start=False, kept=left.shown)
    parts.succession.note = left.note
    parts.key.inherit(key_fd, parts.paths, parts.spec)
    state = hand_over.reopen(state_fd)
    try:
        standby.check_state(state, parts.spec)
        parts.make_standby_engine(state)
    finally:
        os.close(state)
    choice = frontends.Choice(parts.spec.config.device.frontend, "taken over")
    attachment = Attachment(parts.spec, parts.paths, choice)
    parts.attachment = standby.prepare_front_end(attachment, parts.engine, left.note)
    parts.holder.hold_rings(attachment.kernel.rings())
    parts.warm_up()
    parts.make_safe()


async def take_over(parts: Parts, runs: Runs, turn: TakeOver) -> None:
    """In the predecessor's place, after `prepare`.

    Raises:
        HopelessError: no process could.
        InfiniswapError: this process could not; nothing is lost by that.
    """
    # The spec may have changed since it prepared for its turn.
    parts.spec, descriptors = parts.succession.begin(turn, parts.spec)
    parts.lock_fd = descriptors.pop(LOCK, -1)
    far_kept = take_kept(descriptors)
    parts.begun = True
    attachment, backup = parts.attachment, parts.spec.backup
    assert attachment is not None
    await parts.blocking(lambda: standby.take_over_state(parts.engine, backup))
    parts.start_mapper()
    restore_links(parts.engine, parts.mapper, parts.make_link)
    if backup is None:
        # What is suspended could be read from nowhere else.
        await asyncio.gather(*(link.settled() for link in parts.mapper.known_donors.links))
    await parts.blocking(lambda: standby.take_over_front_end(attachment, descriptors))
    parts.succession.done()
    parts.finder.follow()
    parts.start_repairs(attachment)
    parts.start_waker()
    parts.start_tending()
    runs.watch_again()
    parts.take_far_over(far_kept)
