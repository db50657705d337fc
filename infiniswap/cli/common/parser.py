# SPDX-License-Identifier: Apache-2.0
"""Parsing the command line: the first mistake in reading order, and what was probably meant."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from infiniswap.errors import UsageError

_PROGRAM = "infiniswap"
_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_LIKENESS_MIN = 0.6

# Beginnings of argparse's messages.
_REQUIRED = "the following arguments are required: "
_NO_VALUE = "expected one argument"
_TOO_MUCH = "ignored explicit argument"
_EXCLUDED = "not allowed with argument "
_NO_NUMBER = re.compile(r"invalid (int|float) value: (.*)", re.DOTALL)


_SHARED: Final[dict[str, dict[str, Any]]] = {
    "--config": {"type": Path, "metavar": "FILE", "help": "configuration file (TOML)"},
    "--donors": {"metavar": "H[:P],...", "help": "addresses or names of the donors"},
    "--json": {"action": "store_true", "help": "print JSON, for programs"},
    "--secret-file": {"metavar": "FILE", "help": "file with the cluster secret (mode 0600)"},
}
"""Options that several commands have, with one meaning."""


def add_shared(parser: argparse.ArgumentParser, *options: str) -> None:
    """Adds options that other commands have, too."""
    for option in options:
        parser.add_argument(option, **_SHARED[option])


@contextlib.contextmanager
def named(option: str) -> Iterator[None]:
    """Errors of the block name the option whose value is wrong."""
    try:
        yield
    except UsageError as error:
        raise UsageError(error.what, where=error.where or option, mend=error.mend) from None


class Parser(argparse.ArgumentParser):
    """Reports mistakes as UsageError, so that they look like every other error.

    argparse reports an unknown option last, after other mistakes that follow from it, and by the
    top parser, which does not know the options of the command.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        # Else argparse reduces its own errors to their texts.
        super().__init__(*args, **{**options, "exit_on_error": False, "allow_abbrev": False})
        self.register("type", Path, _path)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse does it, which ignores an output that takes nothing."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Makes an exception of what argparse would print."""
        raise argparse.ArgumentError(None, message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it, and everything has to be known.

        Raises:
            UsageError: the first mistake.
        """
        words = list(sys.argv[1:] if args is None else args)
        unknown = self._find_unknown(words)
        commands = self._commands()
        if unknown is not None and commands is not None:
            raise self._too_early(words[unknown], commands)
        try:
            found, rest = super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:
            if unknown is None or self._position(error, words) < unknown:
                raise self._explain(error, words) from None
        else:
            if not rest:
                return found, rest
            if unknown is None or rest[0] != words[unknown]:
                raise self._mistake(f"{rest[0]!r} is one argument too many")
        assert unknown is not None
        raise self._unknown(words[unknown])

    # ------------------------------------------------------------------- what there is

    def _commands(self) -> argparse.Action | None:
        """The argument that is a command or an action."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action
        return None

    def _find_unknown(self, words: Sequence[str]) -> int | None:
        """The place of the first unknown option among this parser's words."""
        ends_early = any(
            action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions
        )
        at = 0
        while at < len(words) and words[at] != "--":
            if _is_option(words[at]):
                name, equals, _ = words[at].partition("=")
                action = self._option_string_actions.get(name)
                if action is None:
                    return at
                at += not equals and action.nargs is None  # its value
            elif ends_early:
                return None
            at += 1
        return None

    def _position(self, error: argparse.ArgumentError, words: Sequence[str]) -> int:
        names = (error.argument_name or "").split("/")
        for at, word in enumerate(words):
            if word.partition("=")[0] in names:
                return at
        return len(words)

    # --------------------------------------------------------------------- what is said

    def _mistake(self, what: str, mend: str = "") -> UsageError:
        where = self.prog.removeprefix(_PROGRAM).strip()
        return UsageError(what, where=where, mend=f"{mend} See `{self.prog} --help`.".lstrip())

    def _unknown(self, word: str) -> UsageError:
        name = word.partition("=")[0]
        near = _nearest(name, (key for key in self._option_string_actions if len(key) > 2))
        return self._mistake(f"there is no option {name}", near)

    def _too_early(self, word: str, commands: argparse.Action) -> UsageError:
        name = word.partition("=")[0]
        metavar = str(commands.metavar)
        return self._mistake(
            f"there is no option {name} before the {metavar.lower()}",
            f"Write options after it: {self.prog} {metavar} {name} ...",
        )

    def _explain(self, error: argparse.ArgumentError, words: Sequence[str]) -> UsageError:
        commands = self._commands()
        if commands is not None:
            known = tuple(commands.choices or ())
            listed, noun = f"There are {', '.join(known)}.", str(commands.metavar).lower()
            word = next((word for word in words if not _is_option(word)), None)
            if word is None:
                return self._mistake(f"the {noun} is missing", listed)
            return self._mistake(f"there is no {noun} {word!r}", _nearest(word, known) or listed)
        if error.argument_name is None:
            return self._missing(error.message, words)
        return self._wrong(error, self._position(error, words), words)

    def _missing(self, message: str, words: Sequence[str]) -> UsageError:
        if not message.startswith(_REQUIRED):
            return self._mistake(message)
        names = message.removeprefix(_REQUIRED)
        late = [word for word in words if word.partition("=")[0] in names.split(", ")]
        mend = f"Write {late[0]} before the command." if late else ""
        return self._mistake(f"{names} {'are' if ', ' in names else 'is'} missing", mend)

    def _wrong(self, error: argparse.ArgumentError, at: int, words: Sequence[str]) -> UsageError:
        """An option with a wrong value, or none."""
        name, near, what = error.argument_name, "", error.message
        action = self._option_string_actions.get(str(name))
        if what.startswith(_NO_VALUE):
            what = "its value is missing"
        elif what.startswith(_TOO_MUCH):
            what = "it takes no value"
        elif what.startswith(_EXCLUDED):
            what = f"it cannot be used together with {what.removeprefix(_EXCLUDED)}"
        elif found := _NO_NUMBER.match(what):
            what = f"{found[2]} is not a {'whole ' if found[1] == 'int' else ''}number"
        elif action is not None and action.choices is not None:
            _, equals, value = words[at].partition("=")
            value = value if equals else words[at + 1]
            near = _nearest(value, action.choices)
            what = f"{value!r} is not one of {', '.join(action.choices)}"
        return self._mistake(f"{name}: {what}", near)


def _path(text: str) -> Path:
    """Refuses an empty name, as of a variable that is not set: it is the current directory's."""
    if not text:
        raise argparse.ArgumentTypeError("its value is empty: name a file or directory")
    return Path(text)


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and " " not in word and not _NUMBER.match(word)


def _nearest(wrong: str, known: Iterable[str]) -> str:
    """A sentence, "" where nothing looks like it."""
    close = difflib.get_close_matches(wrong.lower(), list(known), n=1, cutoff=_LIKENESS_MIN)
    return f"The nearest one is {close[0]}." if close else ""
