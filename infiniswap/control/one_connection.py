# SPDX-License-Identifier: Apache-2.0
"""aiohttp's connections to a donor: one for each session or request, and nothing left of it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from infiniswap.control.admission import Proved
from infiniswap.control.http import ResponseHandler, aiohttp
from infiniswap.control.tls import HearingObject, abort
from infiniswap.errors import NoDonorError


class OneConnection(aiohttp.TCPConnector):
    """Makes one connection, and no second: a proof is for whoever has shown the certificate on the
    first, and aiohttp by itself would send it to whoever answers next.

    Args:
        tls: see client_context.
        check: looks at the certificate that was shown, before anything is sent; raises, or
            returns what it proves.

    Attributes:
        transport: of the connection; None: there is none yet.
        proved: what `check` has returned.
    """

    def __init__(
        self, tls: ssl.SSLContext, check: Callable[[asyncio.Transport], Proved] | None = None
    ) -> None:
        super().__init__(limit=1, ssl=tls)
        self._check = check
        self._tls: ssl.SSLObject | None = None
        self.transport: asyncio.Transport | None = None
        self.proved: Proved | None = None

    async def _create_connection(self, *args: Any, **options: Any) -> ResponseHandler:
        """What a connector has to define, for aiohttp."""
        if self.transport is not None:
            if isinstance(self._tls, HearingObject) and self._tls.alert:
                raise ssl.SSLError(ssl.SSL_ERROR_SSL, f"[SSL: {self._tls.alert}]")
            raise NoDonorError("the donor closed the connection", mend="It may be stopping.")
        made = await super()._create_connection(*args, **options)
        self.transport = made.transport
        assert made.transport is not None
        self._tls = made.transport.get_extra_info("ssl_object")
        if self._check is not None:
            self.proved = self._check(made.transport)
        return made

    async def close(self, *, abort_ssl: bool = True) -> None:
        """Ends the connection at once."""
        if self.transport is not None:
            abort(self.transport)
        await super().close(abort_ssl=abort_ssl)
