# SPDX-License-Identifier: Apache-2.0
"""A device's `/metrics`: on its Unix socket, and on a TCP port where one is configured.

The port is taken before anything is attached, so that one which is in use is an error of the start.
A failure of the port later does not harm the device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from infiniswap.control.figures import METRICS_PATH, Figures
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


class MetricsPage:
    """The page of one device.

    Args:
        service: the device.
    """

    def __init__(self, service: DeviceService) -> None:
        self._service = service

    def figures(self) -> Figures:
        """The current values. InfiniswapError: the device does not serve yet, or has stopped."""
        return metrics.values(self._service.snapshot())

    async def answer(self) -> web.Response:
        """The page, for a reader who is allowed to see it."""
        try:
            return await answer(self.figures)
        except InfiniswapError as error:
            return error_answer(503, error.what)


class MetricsPort:
    """Serves it by TCP.

    Args:
        page: what.
        address: where.
        token: that a reader has to show; None: none is needed.
    """

    def __init__(self, page: MetricsPage, address: HostPort, token: bytes | None) -> None:
        self._page = page
        self._address = address
        self._token = token
        self._port = HttpPort(_LIMITS, Counter())
        self._port.router.add_get(METRICS_PATH, self._get)

    async def start(self) -> str:
        """Returns where it is. Raises ConflictError, SystemCallError: see HttpPort.start."""
        port = await self._port.start(self._address, _MEND)
        return f"http://{HostPort(self._address.host, port)}{METRICS_PATH}"

    async def stop(self) -> None:
        """In bounded time."""
        await self._port.stop()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self._token is not None and not may_scrape(request, self._token):
            return error_answer(401, UNAUTHORIZED)
        return await self._page.answer()


def _port(page: MetricsPage, service: DeviceService) -> MetricsPort | None:
    spec, listen = service.spec, service.spec.config.device.metrics_listen
    if spec.ephemeral or listen is None:
        return None  # a job's own device: two jobs at once would be in each other's way
    return MetricsPort(page, listen, spec.config.metrics_token())


@contextlib.asynccontextmanager
async def metrics_port(service: DeviceService) -> AsyncIterator[str]:
    """Serves the port, where one is configured, while the context is open; gives its URL or "".

    Raises:
        ConfigError: the token cannot be used.
        ConflictError, SystemCallError: the port cannot be had.
    """
    port = _port(MetricsPage(service), service)
    if port is None:
        yield ""
        return
    url = await port.start()
    try:
        yield url
    finally:
        await port.stop()
