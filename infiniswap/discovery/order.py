# SPDX-License-Identifier: Apache-2.0
"""Messages between a device and the process that listens to a broker for it."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from infiniswap.config import MqttConfig

ORDER_BYTES_MAX: Final = 64 * 1024
REPORT_BYTES_MAX: Final = 512 * 1024
NOTES_MAX: Final = 8


class Order(Struct, frozen=True, kw_only=True):
    """The device, and what to listen for. Paths are sent as text."""

    device: str
    mqtt: MqttConfig
    cluster: str
    secret_file: str | None
    second_secret_file: str | None
    state_dir: str
    slab_bytes: int


class Report(Struct, frozen=True, kw_only=True):
    """The donors that are known now.

    Attributes:
        donors: control addresses; None until the broker was heard for the first time.
        problem: as of infiniswap.discovery.listener.Listener.
        notes: sentences for an administrator: identities that are not unique.
    """

    donors: list[str] | None
    problem: str
    notes: list[str]
