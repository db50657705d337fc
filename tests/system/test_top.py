# SPDX-License-Identifier: Apache-2.0
"""`infiniswap top` in a real terminal (tmux): a donor is killed while somebody watches."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import PROGRAM, Cluster, environment, until

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("tmux")]


class Terminal:
    """A window of tmux with a shell, on a server of its own."""

    def __init__(self, directory: Path) -> None:
        self._tmux = ["tmux", "-S", str(directory / "tmux"), "-f", os.devnull]
        self._call("new-session", "-d", "-x", "80", "-y", "24", "env", "PS1=prompt> ", "sh")

    def _call(self, *args: str) -> str:
        env = environment({"LC_ALL": "C.UTF-8"})
        done = subprocess.run(
            [*self._tmux, *args], capture_output=True, text=True, timeout=60, check=True, env=env
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._call("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> list[str]:
        return [line.rstrip() for line in self._call("capture-pane", "-p").splitlines()]

    def shows(self, *words: str) -> list[str]:
        """The screen, once all these words are on it."""

        def found() -> list[str]:
            screen = self.screen()
            return screen if all(word in "\n".join(screen) for word in words) else []

        shown: list[str] = until(found, f"a screen with {words}")
        return shown

    def close(self) -> None:
        self._call("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.close()


def test_a_donor_is_killed_while_it_is_watched(
    cluster: Cluster, terminal: Terminal, tmp_path: Path
) -> None:
    moon, sun = cluster.donor("--name", "moon"), cluster.donor("--name", "sun")
    top = [*PROGRAM, "top", "--donors", f"{moon.address},{sun.address}"]
    settings = [f"{name}={value}" for name, value in cluster.env.items() if "INFINISWAP" in name]
    before = tmp_path / "before"
    after = tmp_path / "after"
    terminal.type(
        f"stty -a >{before}; {shlex.join(['env', *settings, *top])}; stty -a >{after}", "Enter"
    )
    shown = terminal.shows("2 of 2 donors answer", "moon", "sun", "nobody uses these donors")
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 80

    moon.end(signal.SIGKILL)
    shown = terminal.shows("1 of 2 donors answer", "! moon: unreachable")
    assert any(line.startswith("moon") and "unreachable" in line for line in shown)

    terminal.type("4")
    until(lambda: "\nsun" not in "\n".join(terminal.screen()), "the events alone")
    terminal.shows("EVENT", "! moon: unreachable")
    terminal.type("0", "p")
    terminal.shows("PAUSED", "sun")
    terminal.resize(40, 10)
    terminal.shows("This window has 40 x 10")
    terminal.resize(100, 30)
    terminal.shows("PAUSED", "CAN LEND")

    terminal.type("q")
    shown = terminal.shows("prompt>")
    assert "donors answer" not in "\n".join(shown)
    until(lambda: after.exists() and after.read_text(), "the terminal as it was")
    # The size has changed, nothing else.
    assert after.read_text().split(";")[3:] == before.read_text().split(";")[3:]


def test_an_interrupt_ends_it_and_leaves_the_terminal_as_it_was(
    cluster: Cluster, terminal: Terminal
) -> None:
    donor = cluster.donor()
    terminal.type(shlex.join([*PROGRAM, "top", "--donors", donor.address]), "Enter")
    terminal.shows("donors answer")
    terminal.type("C-c")
    terminal.shows("prompt>")
    terminal.type("echo code=$?", "Enter")
    terminal.shows("code=0")


def test_where_nothing_can_be_drawn_it_says_what_to_use(terminal: Terminal) -> None:
    terminal.type(f"TERM=dumb {shlex.join([*PROGRAM, 'top'])}", "Enter")
    terminal.shows("this terminal cannot move its cursor", "infiniswap status")
