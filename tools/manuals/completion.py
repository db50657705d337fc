# SPDX-License-Identifier: Apache-2.0
"""Completion for bash, zsh and fish: scripts made of the parsers by shtab.

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
    "fish": Path("docs/completion/fish/infiniswap.fish"),
}
"""Below the root of the tree; named as the shells look for them."""

_DEVICE: Final = {
    "bash": "_infiniswap_device_names",
    "zsh": "_infiniswap_device_names",
    "fish": "(_infiniswap_devices)",
}
_DONOR: Final = {
    "bash": "_infiniswap_donor_names",
    "zsh": "_infiniswap_donor_names",
    "fish": "(_infiniswap_donors)",
}

_DEVICES: Final = "command ls /run/infiniswap 2>/dev/null"
"""Devices that run, one a line, for any shell."""
_DONORS: Final = r"""_infiniswap_file=${INFINISWAP_CONFIG:-/etc/infiniswap/infiniswap.toml}
  _infiniswap_list=$(command sed -n 's/^ *peers_file *= *"\([^"]*\)".*/\1/p' \
    "$_infiniswap_file" 2>/dev/null)
  {
    command awk '/^ *peers *=/ { on = 1; sub(/^ *peers *=/, "") }
      on { sub(/#.*/, ""); print; if (/\]/) on = 0 }' "$_infiniswap_file"
    [ -f "$_infiniswap_list" ] && command sed 's/#.*//' "$_infiniswap_list"
  } 2>/dev/null | command tr -s '][",\t ' '\n' | command sed '/^$/d'"""
"""Donors that the configuration names, one a line; asks nobody."""


def _in_fish(commands: str) -> str:
    """A command of fish that has a POSIX shell run these."""
    quoted = commands.replace("\\", "\\\\").replace("'", "\\'")
    return f"command sh -c '{quoted}'"


_FUNCTIONS: Final = f"""\
# Devices that run.
_infiniswap_devices() {{
  {_DEVICES}
}}
# Donors that the configuration names.
_infiniswap_donors() {{
  {_DONORS}
}}
"""
_PREAMBLE: Final = {
    "bash": _FUNCTIONS
    + """\
_infiniswap_device_names() {
  compgen -W "$(_infiniswap_devices)" -- "$1"
}
_infiniswap_donor_names() {
  compgen -W "$(_infiniswap_donors)" -- "$1"
}
""",
    "zsh": _FUNCTIONS
    + """\
_infiniswap_device_names() {
  compadd -- ${(f)"$(_infiniswap_devices)"}
}
_infiniswap_donor_names() {
  compadd -- ${(f)"$(_infiniswap_donors)"}
}
""",
    "fish": f"""\
# Devices that run.
function _infiniswap_devices
  {_in_fish(_DEVICES)}
end
# Donors that the configuration names.
function _infiniswap_donors
  {_in_fish(_DONORS)}
end
""",
}


def script(shell: str) -> str:
    """The script for one of FILES."""
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
            if kind is _DONOR:
                action.metavar = "DONOR"  # in zsh `[` and `:` would mean something else


def _kind(action: argparse.Action, command: str) -> object:
    values = set(str(action.metavar).removeprefix("[").removesuffix("]").split("|"))
    if values & {"FILE", "PATH"}:
        return shtab.FILE
    if "DIR" in values:
        return shtab.DIRECTORY
    if "DONOR" in values or str(action.metavar).startswith("H[:P]"):
        return _DONOR
    is_device = "NAME" in values and command.split()[1] in ("device", "run")
    return _DEVICE if is_device else None
