# SPDX-License-Identifier: Apache-2.0
"""Who a donor is."""

from __future__ import annotations

import contextlib
import os
import secrets
import uuid
from dataclasses import dataclass
from pathlib import Path

from infiniswap.control.host_name import host_name
from infiniswap.control.text import clean_name
from infiniswap.units import HostPort


@dataclass(frozen=True, slots=True)
class DonorIdentity:
    """Who this donor is.

    Attributes:
        donor_id: UUID, the same over restarts.
        name: for tables.
        incarnation: 128 bits in hex, new with every start that finds no slabs of a predecessor.
    """

    donor_id: str
    name: str
    incarnation: str


def make_identity(name: str, listen: HostPort) -> DonorIdentity:
    """Who this daemon is: the same over restarts on the same host, network and address."""
    own = host_name()
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    network = 0
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    seed = f"infiniswap donor {machine} {own} {network} {listen}"
    donor_id = uuid.uuid5(uuid.NAMESPACE_OID, seed) if listen.port else uuid.uuid4()
    return DonorIdentity(str(donor_id), clean_name(name, own), secrets.token_hex(16))
