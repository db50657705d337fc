# SPDX-License-Identifier: Apache-2.0
"""What another user could prepare so that a program of ours runs it (system/programs.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from infiniswap.system.programs import SEARCH_PATH

_MODULES = ("infiniswap", "msgspec", "json", "sitecustomize", "usercustomize")
_PROGRAMS = ("true", "losetup", "mkswap", "swapon", "python3", Path(sys.executable).name)
_DIRECTORIES = ("PATH", "PYTHONPATH", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "HOME")
_FILES = ("PYTHONSTARTUP", "BASH_ENV", "ENV")
_OURS = ("PATH", "LC_ALL", "JOURNAL_STREAM", "MALLOC_ARENA_MAX")


class Trap:
    """A directory of modules and programs that leave a mark.

    Attributes:
        path: the directory.
        ran: a file that appears when something of it was run.
        environ: every variable that could lead there.
    """

    def __init__(self, root: Path) -> None:
        self.ran = root / "ran"
        self.path = root / "trap"
        self.path.mkdir()
        for module in _MODULES:
            (self.path / f"{module}.py").write_text(f"open({str(self.ran)!r}, 'w')\n")
        for program in _PROGRAMS:
            (self.path / program).write_text(f"#!/bin/sh\n: >{self.ran}\n")
            (self.path / program).chmod(0o755)
        self.environ = {
            **dict.fromkeys(_DIRECTORIES, str(self.path)),
            **dict.fromkeys(_FILES, str(self.path / "json.py")),
            "LD_PRELOAD": str(self.path / "absent.so"),
        }

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that executes another one there, with that environment."""
        changes = (f"{name}={value}" for name, value in self.environ.items())
        return ("/usr/bin/env", "-C", str(self.path), *changes)


def assert_untouched(pid: int) -> None:
    """A process has neither its caller's directory nor its environment."""
    directory = Path(f"/proc/{pid}")
    assert (directory / "cwd").readlink() == Path("/")
    fields = (directory / "environ").read_bytes().split(b"\0")
    environ = dict(field.decode().split("=", 1) for field in fields if field)
    assert environ["PATH"] == SEARCH_PATH
    assert [n for n in environ if n not in _OURS and not n.startswith("INFINISWAP_")] == []
    words = (directory / "cmdline").read_bytes().split(b"\0")
    assert words[0].startswith(b"/")
    if b"-m" in words:
        assert b"-I" in words[: words.index(b"-m")]
