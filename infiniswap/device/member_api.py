# SPDX-License-Identifier: Apache-2.0
"""What members of the group and a device say to each other: one line of JSON each way.

A connection is one question. Who asks is what the kernel says of the socket's other end
(SO_PEERCRED); nothing in a question can claim to be somebody else.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from infiniswap.device.api import DeviceStatus

LINE_BYTES_MAX: Final = 4096
"""Of a question."""


class AskStatus(Struct, frozen=True, tag="status", tag_field="ask"):
    """Everything that the device tells of itself."""


class AskBegin(Struct, frozen=True, tag="begin", tag_field="ask"):
    """The asking process is an `infiniswap run`; the answer names the cgroup made for its job."""

    local_bytes: int


class AskEnter(Struct, frozen=True, tag="enter", tag_field="ask"):
    """Moves the asking process into the cgroup of the run with that pid, of the same user."""

    run: int


class AskKill(Struct, frozen=True, tag="kill", tag_field="ask"):
    """SIGKILL to everything in the asking run's cgroup."""


class AskEnd(Struct, frozen=True, tag="end", tag_field="ask"):
    """The asking run is over: what is left is killed, the cgroup removed."""


Ask = AskStatus | AskBegin | AskEnter | AskKill | AskEnd


class Reply(Struct, frozen=True, kw_only=True):
    """`error` is empty when it was done; `cgroup` and `version` answer AskBegin."""

    error: str = ""
    exit_code: int = 0
    status: DeviceStatus | None = None
    cgroup: str = ""
    version: int = 0
