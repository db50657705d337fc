# SPDX-License-Identifier: Apache-2.0
"""The completion scripts of docs/completion/, used by real shells on a real terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from manuals import completion
from support.devices.cluster import WAIT_S
from support.jobs.runs import Terminal

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "source {script}; bind 'set bell-style none'",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "fpath=({directory} $fpath); autoload -Uz compinit; compinit -u -D; unsetopt beep",
    ),
    "fish": (["fish", "--no-config", "-i"], "source {script}; function fish_prompt; end"),
}

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\b\x07]")


def completes(window: Terminal, typed: str, wanted: str) -> None:
    """Types it and Tab, and waits until `wanted` is on the line; then empties the line."""
    window.type(typed + "\t")
    while wanted not in _CONTROL.sub("", window.text):
        assert window.read(WAIT_S), window.text
    window.type("\x15echo em''pty\n")
    window.expect("empty")
    window.text = ""


PEERS = """\
[cluster]
# peers = ["wrong"]
peers = [
  "10.77.0.2",  # "also wrong"
  "neptune:9500",
]
peers_file = "{directory}/peers"
"""


@pytest.fixture(
    params=[
        "bash",
        *(pytest.param(name, marks=pytest.mark.requires_tool(name)) for name in ("zsh", "fish")),
    ]
)
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/infiniswap").write_text("#!/bin/sh\nexit 1\n")  # never started
    (tmp_path / "bin/infiniswap").chmod(0o755)
    (tmp_path / "only-file.toml").touch()
    (tmp_path / "peers").write_text("# more\njupiter\n")
    (tmp_path / "own.toml").write_text(PEERS.format(directory=tmp_path))
    command, prepare = SHELLS[request.param]
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    env["INFINISWAP_CONFIG"] = f"{tmp_path}/own.toml"
    window = Terminal(["env", "-C", str(tmp_path), "TERM=dumb", *command], env, columns=500)
    script = ROOT / completion.FILES[request.param]
    try:
        window.type(prepare.format(script=script, directory=script.parent) + "\n")
        window.type(
            "set PS1; echo rea''dy\n" if request.param == "fish" else "PS1=; echo rea''dy\n"
        )
        window.expect("ready")
        yield window
    finally:
        window.close()


def test_tab_completes_commands_actions_options_and_values(terminal: Terminal) -> None:
    completes(terminal, "infiniswap dae", "infiniswap daemon")
    completes(terminal, "infiniswap device sta", "infiniswap device start")
    completes(terminal, "infiniswap run --summ", "--summary-json")
    completes(terminal, "infiniswap device start x --frontend nbd-", "--frontend nbd-socket")
    completes(terminal, "infiniswap status --config on", "--config only-file.toml")


def test_tab_completes_donors_of_the_configuration(terminal: Terminal) -> None:
    completes(terminal, "infiniswap donor drain 10.7", "infiniswap donor drain 10.77.0.2")
    completes(terminal, "infiniswap donor leases jup", "infiniswap donor leases jupiter")
    completes(terminal, "infiniswap run --donors nep", "--donors neptune")


def test_the_scripts_in_the_tree_are_those_of_the_parsers() -> None:
    for shell, path in completion.FILES.items():
        in_tree = (ROOT / path).read_text(encoding="utf-8")
        assert in_tree == completion.script(shell), f"{path}: run `make man`"
