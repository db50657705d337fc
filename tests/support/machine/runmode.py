# SPDX-License-Identifier: Apache-2.0
"""What kind of test run this is, from the environment."""

from __future__ import annotations

import os


def _set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


IN_CI = _set("INFINISWAP_CI")
"""What is missing on this machine is a failure."""
FULL = _set("INFINISWAP_TEST_FULL")
"""Everything runs as often as is ever asked for."""
IN_GUEST = os.environ.get("INFINISWAP_VM", "")
"""The name of the guest's kernel, such as "6.12"; empty outside."""
