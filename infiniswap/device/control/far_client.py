# SPDX-License-Identifier: Apache-2.0
"""A job's connection to the far memory of its device. Blocking."""

from __future__ import annotations

import socket
from typing import Final

from infiniswap.control.text import cleaned
from infiniswap.device.api import DeviceAnswer
from infiniswap.device.control.client import DeviceError
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import ConflictError
from infiniswap.json_text import NotJsonError, decode_json

ANSWER_S: Final = 5.0
_ANSWER_BYTES_MAX: Final = 64 * 1024


def connect(paths: DevicePaths, *, wait_s: float = ANSWER_S) -> socket.socket:
    """The job's end of a connection that the device serves. The job's processes inherit it: the
    device counts the job as ended when all of them, and the caller, have closed it.

    Args:
        paths: of the device.
        wait_s: how long the device may take to answer.

    Raises:
        ConflictError: the device has no far memory, or does not answer.
        DeviceError: its refusal.
    """
    where = str(paths.far_socket)
    job = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        job.settimeout(wait_s)
        try:
            job.connect(where)
            data = job.recv(_ANSWER_BYTES_MAX)
            answer = cleaned(decode_json(data, DeviceAnswer))
        except FileNotFoundError as error:
            raise ConflictError("the device has no far memory", where=where) from error
        except (OSError, NotJsonError) as error:
            raise ConflictError(
                f"the device process does not answer ({error or type(error).__name__})",
                where=where,
                mend="It may be starting or stopping: try again.",
            ) from error
        if answer.error:
            raise DeviceError(answer.error, answer.exit_code)
        job.settimeout(None)
    except BaseException:
        job.close()
        raise
    return job
