# SPDX-License-Identifier: Apache-2.0
"""The device's own control API: HTTP on a Unix socket that only root may open."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from infiniswap import __version__
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.http import web
from infiniswap.control.messages import OPENAPI_PATH, HttpError
from infiniswap.control.openapi import TEXT, Errors, Operation, build
from infiniswap.device.api import (
    DEVICE_PATH,
    LEAVE_PATH,
    RELOAD_PATH,
    RESTART_PATH,
    RUNS_PATH,
    STOP_PATH,
    DeviceAnswer,
    DeviceStatus,
    JoinRequest,
    LeaveRequest,
    ReloadAnswer,
    ReloadRequest,
    RestartRequest,
    StopRequest,
)
from infiniswap.device.process.metrics_port import metrics_page
from infiniswap.device.process.service import DeviceService
from infiniswap.device.spec import contents
from infiniswap.errors import ConflictError, InfiniswapError, UsageError
from infiniswap.json_text import NotJsonError, decode_json

log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 64 * 1024

BodyT = TypeVar("BodyT")
_Call = Callable[[DeviceService, Any], Awaitable[object]]


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
    return DeviceAnswer()


async def _leave(service: DeviceService, body: LeaveRequest) -> object:
    if body.wait:
        await service.leave(body.pid)
    else:
        service.runs.leave_behind(body.pid)
    return DeviceAnswer()


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
    return DeviceAnswer(holder_pid=service.holder.pid)


async def _restart(service: DeviceService, _body: RestartRequest) -> object:
    log.info("asked to restart")
    await service.renew()
    return DeviceAnswer()


async def _reload(service: DeviceService, _body: ReloadRequest) -> object:
    outcome = await service.reload()
    if outcome.error is not None:
        raise outcome.error
    applied, waiting = list(outcome.applied), list(outcome.waiting)
    return ReloadAnswer(applied=applied, waiting=waiting, changes=outcome.changes)


_RELOADS: Final = "Takes over what can change while it runs"
_REFUSED: Final[Errors] = {"409": (DeviceAnswer, "It cannot be done, and why; nothing has changed")}
_CALLS: Final[dict[str, tuple[Operation, _Call]]] = {
    DEVICE_PATH: (Operation("device", "The device's state", DeviceStatus, _REFUSED), _status),
    RUNS_PATH: (
        Operation("join", "A `run` uses the device", DeviceAnswer, _REFUSED, JoinRequest),
        _join,
    ),
    LEAVE_PATH: (
        Operation("leave", "A `run` has ended", DeviceAnswer, _REFUSED, LeaveRequest),
        _leave,
    ),
    STOP_PATH: (
        Operation("stop", "Stops or removes the device", DeviceAnswer, _REFUSED, StopRequest),
        _stop,
    ),
    RELOAD_PATH: (
        Operation("reload", _RELOADS, ReloadAnswer, _REFUSED, ReloadRequest),
        _reload,
    ),
    RESTART_PATH: (
        Operation(
            "restart", "Replaces the device's process", DeviceAnswer, _REFUSED, RestartRequest
        ),
        _restart,
    ),
}
"""What is called for each path: POST where the operation has a body, GET otherwise."""

_PAGES: Final[dict[str, Operation]] = {
    OPENAPI_PATH: Operation("openapi", "This document", dict, {}),
    METRICS_PATH: Operation(
        "metrics",
        "Metrics in the text format of Prometheus",
        TEXT,
        {"503": (HttpError, "It does not serve yet, or has stopped")},
    ),
}
"""Described here, answered by functions of their own."""


def document(software: str) -> dict[str, Any]:
    """The OpenAPI document as a JSON-able dict.

    Args:
        software: version of the device's process.
    """
    info = {
        "title": "Infiniswap device API",
        "version": software,
        "description": "HTTP on `control.sock` in the device's run directory, which only root may "
        "open. /metrics alone is also served over TLS 1.3 where device.metrics_listen says so, to "
        "whoever has the bearer token of cluster.metrics_token_file or, where the cluster has "
        "certificates, one with the role consumer or operator.",
    }
    operations = {path: operation for path, (operation, _) in _CALLS.items()} | _PAGES
    paths = {path: {_method(operation): operation} for path, operation in operations.items()}
    return build(info, paths, (), {})


def _method(operation: Operation) -> str:
    return "get" if operation.body is None else "post"


async def _answer(service: DeviceService, request: web.Request) -> web.StreamResponse:
    operation, call = _CALLS[request.path]
    try:
        body: Any = None if operation.body is None else await _body(request, operation.body)
        if call in (_stop, _restart):
            _check_is_asked(request)
        response = _json(await call(service, body))
    except InfiniswapError as error:
        return _json(DeviceAnswer(error=str(error), exit_code=error.exit_code), 409)
    if call is _restart:
        await response.prepare(request)
        await response.write_eof()  # the asker must get it before this process ends
        service.holder.yield_now()
    return response


def _check_is_asked(request: web.Request) -> None:
    """Raises ConflictError where the asker has gone, as it may have while this process was frozen:
    nobody would know why the device has stopped."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is None:
        raise ConflictError("who asked has gone")
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    if poll.poll(0):
        log.warning("%s: who asked has gone, so nothing is done", request.path)
        raise ConflictError("who asked has gone")


async def _openapi(_request: web.Request) -> web.Response:
    return _json(document(__version__))


async def _metrics(service: DeviceService, _request: web.Request) -> web.Response:
    return await metrics_page(service)


def application(service: DeviceService) -> web.Application:
    """The routes of the socket."""
    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    app.router.add_get(METRICS_PATH, partial(_metrics, service))
    app.router.add_get(OPENAPI_PATH, _openapi)
    for path, (operation, _) in _CALLS.items():
        add = app.router.add_get if operation.body is None else app.router.add_post
        add(path, partial(_answer, service))
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
