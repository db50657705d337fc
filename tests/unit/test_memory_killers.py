# SPDX-License-Identifier: Apache-2.0
"""earlyoom, systemd-oomd and their like on made-up hosts: their thresholds and their signals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.machine.made_host import make_files

from infiniswap.system.memory_killers import is_memory_killers, memory_killers
from infiniswap.units import GIB, MIB


def made(root: Path, name: str, *words: str, pid: int = 77) -> Path:
    """A /proc with one such process."""
    proc = make_files(root / "proc", {f"{pid}/comm": name, "78/comm": "bash"})
    (proc / str(pid) / "cmdline").write_bytes(b"".join(f"{w}\0".encode() for w in (name, *words)))
    return proc


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), 2 * GIB),
        (("-r", "3600", "-m", "15"), 3 * GIB),
        (("-m", "15,10", "-s", "50"), 3 * GIB),
        (("-M", "1048576,524288"), 1 * GIB),
        (("-M", "1048576", "-m", "25"), 1 * GIB),  # the lower one counts
        (("--avoid", "^(init|systemd)$", "-n", "--prefer=java", "-m30"), 6 * GIB),
        (("-m", "many"), 2 * GIB),
        (("--what-is-that",), 2 * GIB),
    ],
)
def test_the_threshold_of_earlyoom(tmp_path: Path, words: tuple[str, ...], wanted: int) -> None:
    proc = made(tmp_path, "earlyoom", *words)
    found = list(memory_killers(20 * GIB, proc=proc, root=tmp_path))
    assert [(one.name, one.pid, one.available_bytes) for one in found] == [("earlyoom", 77, wanted)]


def test_the_threshold_of_systemd_oomd(tmp_path: Path) -> None:
    proc = made(tmp_path, "systemd-oomd")

    def percent() -> float:
        (one,) = memory_killers(10000 * MIB, proc=proc, root=tmp_path)
        return round(one.available_bytes / (100 * MIB), 2)

    assert percent() == 10
    (tmp_path / "etc/systemd").mkdir(parents=True)
    (tmp_path / "etc/systemd/oomd.conf").write_text("[OOM]\n#SwapUsedLimit=1%\n")
    assert percent() == 10
    (tmp_path / "etc/systemd/oomd.conf").write_text("[OOM]\nSwapUsedLimit=80%\n")
    assert percent() == 20
    drop_in = make_files(
        tmp_path,
        {
            "usr/lib/systemd/oomd.conf.d/10-vendor.conf": "[OOM]\nSwapUsedLimit=70%",
            "run/systemd/oomd.conf.d/20-x.conf": "[OOM]\nSwapUsedLimit=955‰",
            "run/systemd/oomd.conf.d/30-none.conf": "no section",
        },
    )
    assert percent() == 4.5
    make_files(drop_in, {"etc/systemd/oomd.conf.d/20-x.conf": "[OOM]\nSwapUsedLimit="})
    assert percent() == 10


def test_a_signal_of_systemd_or_a_shell_is_no_want_of_memory(tmp_path: Path) -> None:
    proc = made(tmp_path, "earlyoom")
    assert is_memory_killers(77, proc=proc)
    assert not is_memory_killers(78, proc=proc)  # a shell
    for manager in (0, 1, os.getppid()):
        assert not is_memory_killers(manager, proc=proc)
    assert not is_memory_killers(1 << 22, proc=proc)  # has ended, as `kill` does


def test_a_signal_of_a_hidden_process_is_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ProtectProc=invisible hides all but the daemon's own; systemd stops it by another way."""

    def refused(_pid: int, _number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert is_memory_killers(99, proc=tmp_path)
