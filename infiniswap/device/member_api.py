# SPDX-License-Identifier: Apache-2.0
"""Messages between members of the group and a device: one line of JSON each way.

A connection carries one question. The kernel says which process asks (SO_PEERCRED); nothing in a
question can claim another identity.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from infiniswap.device.api import DeviceStatus

LINE_BYTES_MAX: Final = 4096
"""Of a question."""


class AskStatus(Struct, frozen=True, tag="status", tag_field="ask"):
    """Asks for the device's status."""


class AskBegin(Struct, frozen=True, tag="begin", tag_field="ask"):
    """Announces the asking `infiniswap run`; the answer names the cgroup made for its job."""

    local_bytes: int


class AskEnter(Struct, frozen=True, tag="enter", tag_field="ask"):
    """Moves the asking process into the cgroup of the run with that pid, of the same user."""

    run: int


class AskRaise(Struct, frozen=True, tag="raise", tag_field="ask"):
    """Raises the memory limit of the asking run's job."""

    local_bytes: int


class AskKill(Struct, frozen=True, tag="kill", tag_field="ask"):
    """Sends SIGKILL to everything in the asking run's cgroup."""


class AskEnd(Struct, frozen=True, tag="end", tag_field="ask"):
    """Ends the asking run: the device kills what is left of its job and removes the cgroup."""


Ask = AskStatus | AskBegin | AskEnter | AskRaise | AskKill | AskEnd


class Reply(Struct, frozen=True, kw_only=True):
    """`error` is empty after a success; `cgroup` and `version` answer AskBegin."""

    error: str = ""
    exit_code: int = 0
    status: DeviceStatus | None = None
    cgroup: str = ""
    version: int = 0
