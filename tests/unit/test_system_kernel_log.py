# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.kernel_log, on a file in place of the kernel's log."""

from __future__ import annotations

from pathlib import Path

from infiniswap.system.kernel_log import KernelLog


def test_a_record_is_found_by_its_first_words_if_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("4,1,100,-;swapoff invoked oom-killer: before\n")
    log = KernelLog(path)
    try:
        assert not log.says("swapoff invoked", 0.0)
        with path.open("a") as file:
            file.write("4,2,200,-;swapoff invoked oom-killer: after\n")
        assert log.says("swapoff invoked", 0.0)
    finally:
        log.close()
    assert not log.says("swapoff invoked", 60.0)


def test_a_log_that_may_not_be_read_says_nothing(tmp_path: Path) -> None:
    assert not KernelLog(tmp_path / "none").says("x", 60.0)
