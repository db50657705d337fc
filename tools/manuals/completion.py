# SPDX-License-Identifier: Apache-2.0
"""Completion for bash and zsh: scripts made of the parsers by shtab.

The scripts know everything themselves: pressing Tab starts no Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import shtab

from infiniswap.cli.main import build_parser

FILES: Final = {
    "bash": Path("docs/completion/bash/infiniswap"),
    "zsh": Path("docs/completion/zsh/_infiniswap"),
}
"""Below the root of the tree; named as the shells look for them."""

_DEVICE: Final = {"bash": "_infiniswap_device_names", "zsh": "_infiniswap_device_names"}
_PREAMBLE: Final = {
    "bash": """\
# Devices that run.
_infiniswap_device_names() {
  [ -d /run/infiniswap ] && compgen -W "$(ls /run/infiniswap)" -- "$1"
}
""",
    "zsh": """\
# Devices that run.
_infiniswap_device_names() {
  [[ -d /run/infiniswap ]] && compadd -- /run/infiniswap/*(N:t)
}
""",
}


def script(shell: str) -> str:
    """The script for "bash" or "zsh"."""
    parser = build_parser()
    _mark(parser)
    text: str = shtab.complete(parser, shell, root_prefix="_infiniswap", preamble=_PREAMBLE[shell])
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _mark(parser: argparse.ArgumentParser) -> None:
    """Says of each value what it is, as far as a shell can list such things."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help for choice in action._choices_actions}
            for name, below in action.choices.items():
                below.description = summaries.get(name)  # shown beside it: one line
                _mark(below)
        elif kind := _kind(action, parser.prog):
            action.complete = kind  # type: ignore[attr-defined]


def _kind(action: argparse.Action, command: str) -> object:
    values = set(str(action.metavar).removeprefix("[").removesuffix("]").split("|"))
    if values & {"FILE", "PATH"}:
        return shtab.FILE
    if "DIR" in values:
        return shtab.DIRECTORY
    is_device = "NAME" in values and command.split()[1] in ("device", "run")
    return _DEVICE if is_device else None
