# SPDX-License-Identifier: Apache-2.0
"""Pages over TCP, by the NBD protocol: every donor has it."""

from __future__ import annotations

import errno
import logging

from infiniswap.device.donors.transports.base import Dial, Target, Transport
from infiniswap.errors import EngineError

log = logging.getLogger(__name__)


class Tcp(Transport):
    """See Transport."""

    name = "tcp"
    label = "TCP"

    async def connect(self, target: Target, dial: Dial, *, is_trial: bool = False) -> int:
        """See Transport."""
        try:
            return await self._dial(target, dial, is_trial=is_trial)
        except EngineError as error:
            if error.code != errno.ENOENT:
                raise
            text = "donor %s did not accept a ticket that it had just given: %s; if somebody who "
            text += "reads packets was faster, new tickets end their connections"
            log.warning(text, target.session.address, error.what)
        return await self._dial(target, dial, is_trial=is_trial)

    async def _dial(self, target: Target, dial: Dial, *, is_trial: bool) -> int:
        config = await self._with_tickets(target, target.config.queues, is_trial=is_trial)
        return await self._blocking(lambda: dial(config))
