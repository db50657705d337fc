# SPDX-License-Identifier: Apache-2.0
"""A device's `/metrics`: on its Unix socket, and on a TCP port where one is configured.

The port is taken before anything is attached, so that one which is in use is an error of the start.
A failure of the port later does not harm the device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.http import web
from infiniswap.control.port import HttpPort, PortLimits, error_answer
from infiniswap.control.scrape import UNAUTHORIZED, answer, may_scrape
from infiniswap.device.process import metrics
from infiniswap.device.process.service import DeviceService
from infiniswap.errors import InfiniswapError
from infiniswap.units import HostPort

_LIMITS = PortLimits(connections_max=32, connections_per_host_max=8, stop_s=1.0)
_MEND = (
    "Another device may serve its metrics there: give each its own with --metrics-listen, or set "
    "device.metrics_listen to another port."
)


async def metrics_page(service: DeviceService) -> web.Response:
    """The page of the device; 503 while it does not serve yet, or has stopped."""
    try:
        return await answer(lambda: metrics.values(service.snapshot()))
    except InfiniswapError as error:
        return error_answer(503, error.what)


@contextlib.asynccontextmanager
async def metrics_port(service: DeviceService) -> AsyncIterator[str]:
    """Serves the port, where one is configured, while the context is open; gives its URL or "".

    Raises:
        ConfigError: the token cannot be used.
        ConflictError, SystemCallError: the port cannot be had.
    """
    spec, listen = service.spec, service.spec.config.device.metrics_listen
    if spec.ephemeral or listen is None:
        yield ""  # a job's own device: two jobs at once would be in each other's way
        return
    token = spec.config.metrics_token()

    async def get(request: web.Request) -> web.StreamResponse:
        if token is not None and not may_scrape(request, token):
            return error_answer(401, UNAUTHORIZED)
        return await metrics_page(service)

    port = HttpPort(_LIMITS, Counter())
    port.router.add_get(METRICS_PATH, get)
    number = await port.start(listen, _MEND)
    try:
        yield f"http://{HostPort(listen.host, number)}{METRICS_PATH}"
    finally:
        await port.stop()
