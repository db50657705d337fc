# SPDX-License-Identifier: Apache-2.0
"""The completion scripts of docs/completion/, used by real shells on a real terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from manuals import completion

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
"""Bound; never reached on success."""

SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "source {script}; bind 'set bell-style none'",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "fpath=({directory} $fpath); autoload -Uz compinit; compinit -u -D; unsetopt beep",
    ),
}

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\b\x07]")


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, shell: str, directory: Path) -> None:
        command, prepare = SHELLS[shell]
        self._end, terminal = pty.openpty()
        path = (directory / "bin", *map(Path, ("/usr/bin", "/bin")))
        self._process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=directory,
            env={"PATH": ":".join(map(str, path)), "TERM": "dumb", "HOME": str(directory)},
            start_new_session=True,
        )
        os.close(terminal)
        script = ROOT / completion.FILES[shell]
        self._write(prepare.format(script=script, directory=script.parent) + "\n")
        self._write("PS1=; stty cols 500; echo rea''dy\n")
        self._read_until("ready")

    def _write(self, text: str) -> None:
        os.write(self._end, text.encode())

    def _read_until(self, wanted: str) -> str:
        text = ""
        end_s = time.monotonic() + WAIT_S
        while wanted not in text:
            ready, _, _ = select.select([self._end], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"waited in vain for {wanted!r} in {text!r}"
            text += _CONTROL.sub("", os.read(self._end, 4096).decode(errors="replace"))
        return text

    def completes(self, typed: str, wanted: str) -> None:
        """Types it and Tab, and waits until `wanted` is on the line; then empties the line."""
        self._write(typed + "\t")
        self._read_until(wanted)
        self._write("\x15echo em''pty\n")
        self._read_until("empty")

    def close(self) -> None:
        """Ends the shell."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)
        os.close(self._end)


@pytest.fixture(params=["bash", pytest.param("zsh", marks=pytest.mark.requires_tool("zsh"))])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/infiniswap").write_text("#!/bin/sh\nexit 1\n")  # never started
    (tmp_path / "bin/infiniswap").chmod(0o755)
    (tmp_path / "only-file.toml").touch()
    made = Terminal(request.param, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_tab_completes_commands_actions_options_and_values(terminal: Terminal) -> None:
    terminal.completes("infiniswap dae", "infiniswap daemon")
    terminal.completes("infiniswap device sta", "infiniswap device start")
    terminal.completes("infiniswap run --summ", "--summary-json")
    terminal.completes("infiniswap device start x --frontend nbd-", "--frontend nbd-socket")
    terminal.completes("infiniswap status --config on", "--config only-file.toml")


def test_the_scripts_in_the_tree_are_those_of_the_parsers() -> None:
    for shell, path in completion.FILES.items():
        in_tree = (ROOT / path).read_text(encoding="utf-8")
        assert in_tree == completion.script(shell), f"{path}: run `make man`"
