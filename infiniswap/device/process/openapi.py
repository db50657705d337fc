# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of a device's control API, on its Unix socket."""

from __future__ import annotations

from typing import Any, Final

from infiniswap.control import messages as m
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.openapi import TEXT, Errors, Operation, build
from infiniswap.device import api

_REFUSED: Final[Errors] = {"409": (api.Answer, "It cannot be done, and why; nothing has changed")}


def document(software: str) -> dict[str, Any]:
    """The document as a JSON-able dict.

    Args:
        software: version of the device's process.
    """
    gets = {
        api.DEVICE_PATH: Operation("device", "The device's state", api.DeviceStatus, _REFUSED),
        m.OPENAPI_PATH: Operation("openapi", "This document", dict, {}),
        METRICS_PATH: Operation(
            "metrics",
            "Metrics in the text format of Prometheus",
            TEXT,
            {"503": (m.HttpError, "It does not serve yet, or no more")},
        ),
    }
    posts = {
        api.RUNS_PATH: Operation(
            "join", "A `run` uses the device", api.Answer, _REFUSED, api.JoinRequest
        ),
        api.LEAVE_PATH: Operation(
            "leave", "A `run` has ended", api.Answer, _REFUSED, api.LeaveRequest
        ),
        api.STOP_PATH: Operation(
            "stop", "Stops or removes the device", api.Answer, _REFUSED, api.StopRequest
        ),
        api.RELOAD_PATH: Operation(
            "reload",
            "Takes over what can change while it runs",
            api.ReloadAnswer,
            _REFUSED,
            api.ReloadRequest,
        ),
        api.RESTART_PATH: Operation(
            "restart", "Replaces the device's process", api.Answer, _REFUSED, api.RestartRequest
        ),
    }
    info = {
        "title": "Infiniswap device API",
        "version": software,
        "description": "HTTP on `control.sock` in the device's run directory, which only root may "
        "open. /metrics alone is also served by TCP where device.metrics_listen says so, with the "
        "bearer token of cluster.metrics_token_file where there is one.",
    }
    paths = {path: {"get": operation} for path, operation in gets.items()}
    paths |= {path: {"post": operation} for path, operation in posts.items()}
    return build(info, paths, (), {})
