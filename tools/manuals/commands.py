# SPDX-License-Identifier: Apache-2.0
"""What the parsers know of each command, as data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from infiniswap.cli.main import build_parser


@dataclass(frozen=True, slots=True)
class Option:
    """One option, or one argument by position (which has no names).

    Attributes:
        names: as they are typed, such as ("-h", "--help").
        value: what stands for its value; empty when it takes none.
        help: one or more phrases, as `--help` prints them.
    """

    names: tuple[str, ...]
    value: str
    help: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or an action of one.

    Attributes:
        words: what is typed, such as ("infiniswap", "device", "start").
        summary: one line.
        description: one paragraph, may be empty.
        synopsis: the words that follow, each with its brackets.
        options: in the parser's order.
        arguments: by position, those with a help text.
        actions: commands below this one.
    """

    words: tuple[str, ...]
    summary: str
    description: str
    synopsis: tuple[str, ...]
    options: tuple[Option, ...]
    arguments: tuple[Option, ...]
    actions: tuple[Command, ...]

    @property
    def page(self) -> str:
        """Name of its page: `infiniswap device start` is on that of `infiniswap device`."""
        return "-".join(self.words[:2])

    def walk(self) -> Iterator[Command]:
        """Itself and all below."""
        yield self
        for action in self.actions:
            yield from action.walk()


def whole() -> Command:
    """The whole command line."""
    return _read(build_parser(), ("infiniswap",), "swap space in the memory of other hosts")


def _read(parser: argparse.ArgumentParser, words: tuple[str, ...], summary: str) -> Command:
    options, arguments = [], []
    actions: tuple[Command, ...] = ()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            actions = tuple(_below(action, words))
        elif action.option_strings:
            options.append(_option(parser, action))
        elif action.help:
            arguments.append(_option(parser, action))
    return Command(
        words=words,
        summary=summary,
        description=" ".join((parser.description or "").split()),
        synopsis=tuple(_synopsis(parser)),
        options=tuple(options),
        arguments=tuple(arguments),
        actions=actions,
    )


def _below(
    action: argparse._SubParsersAction[argparse.ArgumentParser], words: tuple[str, ...]
) -> Iterator[Command]:
    summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
    for name, parser in action.choices.items():
        if name in summaries:  # not an alias
            yield _read(parser, (*words, name), summaries[name])


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if isinstance(action, argparse._HelpAction):
        text = "show a summary and exit"
        if parser._subparsers is not None:
            text += "; likewise after each command"
    elif isinstance(action, argparse._VersionAction):
        text = "show the version and exit"
    return Option(tuple(action.option_strings), _value(action), " ".join(text.split()))


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "|".join(str(choice) for choice in action.choices)
    return action.dest.upper()


def _synopsis(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The words of the usage line, without --help and --version, which every reader knows."""
    groups = {
        action: group
        for group in parser._mutually_exclusive_groups
        for action in group._group_actions
    }
    last: list[str] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(
            action, argparse._HelpAction | argparse._VersionAction
        ):
            continue
        if isinstance(action, argparse._SubParsersAction):
            last += [str(action.metavar), "..."]
        elif not action.option_strings:
            last.append(_positional(action))
        elif group := groups.get(action):
            if group._group_actions[0] is action:
                text = " | ".join(_typed(member) for member in group._group_actions)
                yield f"({text})" if group.required else f"[{text}]"
        else:
            yield _typed(action) if action.required else f"[{_typed(action)}]"
    yield from last


def _positional(action: argparse.Action) -> str:
    text = _value(action)
    if action.nargs == argparse.OPTIONAL:
        return f"[{text}]"
    if action.nargs == argparse.ZERO_OR_MORE:
        return f"[{text}...]"
    return f"{text}..." if action.nargs == argparse.ONE_OR_MORE else text


def _typed(action: argparse.Action) -> str:
    """Its shortest name that says something, and its value."""
    name = max(action.option_strings, key=len)
    value = _value(action)
    return f"{name} {value}" if value else name
