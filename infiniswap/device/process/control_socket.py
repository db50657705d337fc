# SPDX-License-Identifier: Apache-2.0
"""The device's own control API: HTTP on a Unix socket that only root may open."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from infiniswap import __version__
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.http import web
from infiniswap.control.messages import OPENAPI_PATH
from infiniswap.device.api import (
    DEVICE_PATH,
    LEAVE_PATH,
    RELOAD_PATH,
    RESTART_PATH,
    RUNS_PATH,
    STOP_PATH,
    Answer,
    JoinRequest,
    LeaveRequest,
    ReloadAnswer,
    ReloadRequest,
    RestartRequest,
    StopRequest,
)
from infiniswap.device.process.metrics_port import MetricsPage
from infiniswap.device.process.service import DeviceService
from infiniswap.device.spec import contents
from infiniswap.errors import ConflictError, InfiniswapError, UsageError
from infiniswap.json_text import NotJsonError, decode_json

log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 64 * 1024

BodyT = TypeVar("BodyT")


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


async def _body(request: web.Request, kind: type[BodyT]) -> BodyT:
    try:
        return decode_json(await request.read(), kind)
    except NotJsonError as error:
        raise UsageError(f"not a request of this API ({error})") from None


async def _status(service: DeviceService, _nothing: None) -> object:
    return service.status()


async def _join(service: DeviceService, body: JoinRequest) -> object:
    service.join(body.pid)
    return Answer()


async def _leave(service: DeviceService, body: LeaveRequest) -> object:
    if body.wait:
        await service.leave(body.pid)
    else:
        service.runs.leave_behind(body.pid)
    return Answer()


async def _stop(service: DeviceService, body: StopRequest) -> object:
    log.info("asked to %s", "remove" if body.remove else "stop")
    spec = service.spec
    if pids := service.runs.pids():
        raise ConflictError(
            "`infiniswap run` uses it: process " + ", ".join(str(pid) for pid in pids),
            where=f"device {spec.name}",
            mend="End that first.",
        )
    if not (body.remove or spec.ephemeral or contents.keeps_record(spec)):
        raise ConflictError(
            "it has no backup, so stopping it would lose its contents",
            where=f"device {spec.name}",
            mend=f"If that is meant: infiniswap device remove {spec.name}.",
        )
    await service.stop(remove=body.remove or spec.ephemeral)
    return Answer(holder_pid=service.holder.pid)


async def _renew(service: DeviceService, _body: RestartRequest) -> object:
    log.info("asked to restart")
    await service.renew()
    return Answer()


async def _reload(service: DeviceService, _body: ReloadRequest) -> object:
    outcome = await service.reload()
    if outcome.error is not None:
        raise outcome.error
    return ReloadAnswer(applied=list(outcome.applied), waiting=list(outcome.waiting))


_CALLS: Final[
    Mapping[str, tuple[type[Any] | None, Callable[[DeviceService, Any], Awaitable[object]]]]
] = {
    DEVICE_PATH: (None, _status),
    RUNS_PATH: (JoinRequest, _join),
    LEAVE_PATH: (LeaveRequest, _leave),
    STOP_PATH: (StopRequest, _stop),
    RESTART_PATH: (RestartRequest, _renew),
    RELOAD_PATH: (ReloadRequest, _reload),
}
"""What is called for each path, with the body of a POST, or None for a GET. openapi.py describes
it."""


async def _call(service: DeviceService, request: web.Request) -> web.StreamResponse:
    kind, call = _CALLS[request.path]
    try:
        body = None if kind is None else await _body(request, kind)
        response = _json(await call(service, body))
    except InfiniswapError as error:
        return _json(Answer(error=str(error), exit_code=error.exit_code), 409)
    if request.path == RESTART_PATH:
        await response.prepare(request)
        await response.write_eof()  # whoever has asked must hear it before this process ends
        service.holder.yield_now()
    return response


async def _openapi(_request: web.Request) -> web.Response:
    from infiniswap.device.process.openapi import document

    return _json(document(__version__))


async def _metrics(page: MetricsPage, _request: web.Request) -> web.Response:
    return await page.answer()


def application(service: DeviceService) -> web.Application:
    """All that the socket serves."""
    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    app.router.add_get(METRICS_PATH, partial(_metrics, MetricsPage(service)))
    app.router.add_get(OPENAPI_PATH, _openapi)
    for path, (kind, _) in _CALLS.items():
        add = app.router.add_get if kind is None else app.router.add_post
        add(path, partial(_call, service))
    return app


@contextlib.asynccontextmanager
async def control_socket(service: DeviceService) -> AsyncIterator[None]:
    """Serves the socket while the context is open."""
    runner = web.AppRunner(application(service), access_log=None, handle_signals=False)
    await runner.setup()
    path = service.paths.socket
    try:
        path.unlink(missing_ok=True)
        # The directory is searchable by all; the socket is what must not be.
        previous = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(previous)
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)
