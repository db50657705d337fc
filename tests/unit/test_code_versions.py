# SPDX-License-Identifier: Apache-2.0
"""Versions of the code side by side: which are in use, and which go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from infiniswap import code_versions
from infiniswap.code_versions import MARKER

HOLDER = "lib/infiniswap/device/infiniswap-holder"


class Host:
    """Versions `old` and `new`, of which `new` is the current one, and made-up processes."""

    def __init__(self, root: Path) -> None:
        self.top = root / "usr/lib/infiniswap"
        self.proc = root / "proc"
        self.proc.mkdir()
        for name in ("old", "new", "package"):
            self.version(name).mkdir(parents=True)
            (self.version(name) / MARKER).write_text(f"{name}\n")
        (self.top / "current").symlink_to("new")
        self._pids = iter(range(os.getpid() + 1, os.getpid() + 100))

    def version(self, name: str) -> Path:
        return self.top / name

    def process(
        self, *words: str, exe: str = "/usr/bin/python3.11", parent: int = 1, root: str = "/"
    ) -> int:
        pid = next(self._pids)
        process = self.proc / str(pid)
        process.mkdir()
        (process / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))
        (process / "exe").symlink_to(exe)
        (process / "root").symlink_to(root)
        (process / "stat").write_text(f"{pid} (a) b) S {parent} 1 1\n")
        (process / "cgroup").write_text("1:name=systemd:/\n0::/system.slice/infiniswapd.service\n")
        return pid

    def python(self, version: str, *words: str, parent: int = 1) -> int:
        return self.process(f"{self.version(version)}/bin/python3", "-I", *words, parent=parent)

    def holder(self, version: str) -> int:
        program = str(self.version(version) / HOLDER)
        python = f"{self.version(version)}/bin/python3"
        return self.process(program, "5", "4", python, "-m", "infiniswap.device", exe=program)

    def sweep(self) -> list[int]:
        return [process.pid for process in code_versions.sweep(self.top, proc=self.proc)]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_nobody_uses_goes_and_the_current_version_and_dpkgs_copy_stay(host: Host) -> None:
    host.python("new", "-m", "infiniswap.device", "active")
    host.process("/usr/bin/vi", "/etc/infiniswap/infiniswap.toml")
    assert host.sweep() == []
    assert sorted(path.name for path in host.top.iterdir()) == ["current", "new", "package"]


def test_a_version_that_a_process_runs_stays(host: Host) -> None:
    pid = host.python("old", "-m", "infiniswap.device", "active")
    assert host.sweep() == [pid]
    assert host.version("old").is_dir()
    shutil.rmtree(host.proc / str(pid))
    assert host.sweep() == []
    assert not host.version("old").exists()


def test_a_process_of_another_root_needs_no_version(host: Host, tmp_path: Path) -> None:
    container = tmp_path / "container"
    python = f"{host.version('old')}/bin/python3"
    without = host.process(python, "-m", "infiniswap.device", root=str(container))
    assert code_versions.processes(host.top, proc=host.proc) == []
    (container / str(host.version("old"))[1:]).mkdir(parents=True)
    assert code_versions.processes(host.top, proc=host.proc) == []
    (host.proc / str(without) / "root").unlink()
    (host.proc / str(without) / "root").symlink_to("/")
    assert [process.pid for process in code_versions.processes(host.top, proc=host.proc)] == [
        without
    ]


def test_a_version_stays_for_a_holder_without_a_child(host: Host) -> None:
    """It is about to start one."""
    pid = host.holder("old")
    assert host.sweep() == [pid]


def test_a_holder_needs_the_version_of_its_children(host: Host) -> None:
    """The device was restarted: its holder is the same process, and starts the new code."""
    pid = host.holder("old")
    active = host.python("old", "-m", "infiniswap.device", "active", parent=pid)
    standby = host.python("new", "-m", "infiniswap.device", "standby", parent=pid)
    assert host.sweep() == [pid, active]
    shutil.rmtree(host.proc / str(active))
    assert host.sweep() == []
    assert not host.version("old").exists()
    found = code_versions.processes(host.top, proc=host.proc)
    assert [(process.pid, process.version.name) for process in found] == [(standby, "new")]
    assert found[0].unit == "infiniswapd.service"


def test_other_directories_there_are_left_alone(host: Host) -> None:
    (host.top / "mine").mkdir()
    (host.top / ".new").mkdir()
    (host.top / ".new" / MARKER).write_text("")
    host.sweep()
    assert (host.top / "mine").is_dir()
    assert (host.top / ".new").is_dir()


def test_a_restart_leads_to_the_current_version(host: Host) -> None:
    old = str(host.version("old"))
    assert code_versions.packaged_in(old) == host.top
    interpreter = Path(code_versions.current_interpreter(old))
    assert interpreter.parent == host.version("new") / "bin"


@pytest.mark.parametrize("lacking", ["old/" + MARKER, "new/" + MARKER, "current"])
def test_other_installations_have_one_version(host: Host, lacking: str) -> None:
    """A virtual environment may lie beside something else that is called `current`."""
    (host.top / lacking).unlink()
    assert code_versions.packaged_in(str(host.version("old"))) is None
    assert code_versions.current_interpreter(str(host.version("old"))) == ""
    assert code_versions.packaged_in() is None
