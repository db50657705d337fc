# SPDX-License-Identifier: Apache-2.0
"""A device's `/metrics`: on its Unix socket, and over TLS at a TCP port where one is configured.

The port is taken before anything is attached, so that one which is in use is an error of the start.
A failure of the port later does not harm the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator

from infiniswap.control.admission import Admission
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.handshake import PeerLog
from infiniswap.control.http import web
from infiniswap.control.listening import check_reach
from infiniswap.control.port import HttpPort, PortLimits, error_answer
from infiniswap.control.scrape import READERS, UNAUTHORIZED, answer, may_scrape
from infiniswap.control.tls import ServerTls
from infiniswap.device.process import metrics
from infiniswap.device.process.metrics_access import Access
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
        ConfigError: certificate or token cannot be used.
        ConflictError, SystemCallError: the port cannot be had.
    """
    spec, listen = service.spec, service.spec.config.device.metrics_listen
    if listen is None or not spec.has_metrics_port:
        yield ""
        return
    await asyncio.to_thread(check_reach, listen, "device.metrics_listen")
    access = await service.metrics_access()

    async def get(request: web.Request) -> web.StreamResponse:
        assert access.now is not None
        refusal = _refusal(access.now, request)
        if refusal is not None:
            return refusal
        port.proved(request)
        return await metrics_page(service)

    assert access.now is not None
    port = _port(access.now.tls)
    port.router.add_get(METRICS_PATH, get)
    number = await port.start(listen, _MEND)
    access.on_change = port.use_tls
    access.show()
    try:
        yield f"https://{HostPort(listen.host, number).in_uri}{METRICS_PATH}"
    finally:
        await port.stop()


def _refusal(access: Access, request: web.Request) -> web.Response | None:
    """The answer to whoever may not read them. As at a daemon's port."""
    if may_scrape(request, access.token):
        return None
    if not access.tls.cluster:
        return error_answer(401, UNAUTHORIZED)
    try:
        Admission(access.tls).admit(request.transport, READERS, time.time())
    except ValueError as error:
        return error_answer(403, str(error))
    return None


def _port(tls: ServerTls) -> HttpPort:
    counters: Counter[str] = Counter()
    log_peer = PeerLog(counters)

    def refused(host: str, why: str) -> None:
        log_peer("metrics port: refused a connection from %s: %s", host, why)

    return HttpPort(
        _LIMITS,
        counters,
        lambda host: refused(host, "too many are open, or too many began lately"),
        lambda host: refused(host, "it does not begin TLS"),
        tls,
        refused,
    )
