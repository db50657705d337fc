# SPDX-License-Identifier: Apache-2.0
"""Infiniswap: idle memory of other hosts as swap space."""

from __future__ import annotations

__version__ = "0.1.0"
