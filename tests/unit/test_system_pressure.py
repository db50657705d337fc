# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.pressure."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from infiniswap.errors import UnavailableError
from infiniswap.system.pressure import PressureTrigger


def test_no_figures_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no pressure figures"):
        PressureTrigger(proc=tmp_path)


def test_a_file_that_grants_no_trigger_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text("")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnavailableError, match="no pressure trigger"):
        PressureTrigger(proc=tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_quiet_host_fires_nothing() -> None:
    try:
        trigger = PressureTrigger(stall_us=1_900_000)
    except UnavailableError as error:
        pytest.skip(f"this kernel grants no trigger: {error}")
    try:
        assert select.select([trigger.fileno()], [], [], 0)[0] == []
    finally:
        trigger.close()
        trigger.close()
