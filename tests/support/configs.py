# SPDX-License-Identifier: Apache-2.0
"""Configurations of this host that neither a file nor the environment has a part in."""

from __future__ import annotations

from pathlib import Path

from infiniswap.config import Config, load


def configured(**keys: object) -> Config:
    """The defaults but for those keys; `daemon__slab` stands for daemon.slab."""
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return load(Path("/dev/null"), named, {})
