# SPDX-License-Identifier: Apache-2.0
"""This host's own name, as its owner or anybody with its console has set it."""

from __future__ import annotations

import socket

from infiniswap.control.text import clean_name


def host_name() -> str:
    """Returns the name that people and peers see. The kernel takes any bytes for a name, so what
    cannot be printed is replaced."""
    return clean_name(socket.gethostname(), "unnamed")
