# SPDX-License-Identifier: Apache-2.0
"""Manual pages: what the parsers say, joined with a text from docs/man/.

A text is named NAME.SECTION.md. That of a command (infiniswap-run.1.md) has the sections that no
parser knows: description, examples, exit status, files, see also. Any other page is all text. The
outcome is roff for `man` and Markdown for the site.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from infiniswap import __version__
from manuals import roff
from manuals.commands import Command, Option, whole

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ROOT / "docs/man"
DATE: Final = "2026-11-22"
"""Of the pages; the day of a release."""

SECTIONS: Final = ("Examples", "See also")
"""What every command's text must have."""

_INCLUDE = re.compile(r"^<!-- include: (\S+) -->\n", re.MULTILINE)


class PageError(Exception):
    """A page that cannot be made; the text says what to write where."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of level 2 and what follows it, in Markdown."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        name: such as "infiniswap-run".
        section: of the manual, a digit.
        summary: one line.
        texts: the hand-written sections.
        command: what it describes, if it is a command.
    """

    name: str
    section: str
    summary: str
    texts: tuple[Section, ...]
    command: Command | None

    @property
    def path(self) -> Path:
        """Of its roff, below docs/man."""
        return Path(f"man{self.section}") / f"{self.name}.{self.section}"

    def to_roff(self) -> str:
        """For `man`."""
        lines = [
            f'.\\" Made of docs/man/{self.name}.{self.section}.md and the parsers by `make man`.',
            f'.TH {self.name.upper()} {self.section} {DATE} "infiniswap {__version__}" Infiniswap',
            ".nh",
            ".SH NAME",
            f"{roff.escape(self.name)} \\- {roff.escape(self.summary)}",
            *_Roff().parts(self),
        ]
        kept = [
            line
            for before, line in zip(["", *lines], lines, strict=False)
            if not (line == ".PP" and before[:3] in (".SH", ".SS"))  # redundant there
        ]
        return "\n".join(kept) + "\n"

    def to_markdown(self) -> str:
        """For the site."""
        title = f"# {self.name}({self.section})\n\n{self.summary}\n"
        return title + "\n".join(_Markdown().parts(self)) + "\n"


class _Writer:
    """The order of a page's parts, which is the same in every form."""

    def parts(self, page: Page) -> Iterator[str]:
        own = {"Description"} if page.command else set()
        if page.command is not None:
            yield from self.heading("Synopsis")
            yield from self.synopsis(page.command)
            yield from self.heading("Description")
            yield from self.text(page.command.description)
            yield from self._texts(page, own, with_headings=False)
            yield from self._below(page.command)
            if page.command.options:
                yield from self.heading("Options")
                yield from self.options(page.command)
        yield from self._texts(page, {text.title for text in page.texts} - own, with_headings=True)

    def _texts(self, page: Page, titles: set[str], *, with_headings: bool) -> Iterator[str]:
        for text in page.texts:
            if text.title in titles:
                if with_headings:
                    yield from self.heading(text.title)
                yield from self.text(text.text)

    def _below(self, command: Command) -> Iterator[str]:
        if not command.actions:
            return
        yield from self.heading("Commands")
        if len(command.words) == 1:  # each has a page of its own
            yield from self.terms((f"{c.page}(1)", c.summary) for c in command.actions)
            return
        for action in (item for top in command.actions for item in top.walk()):
            yield from self.heading(" ".join(action.words[2:]), deeper=True)
            yield from self.synopsis(action)
            yield from self.text(_sentence(action.description or action.summary))
            yield from self.options(action)

    def heading(self, title: str, *, deeper: bool = False) -> Iterable[str]:
        raise NotImplementedError

    def synopsis(self, command: Command) -> Iterable[str]:
        raise NotImplementedError

    def text(self, markdown: str) -> Iterable[str]:
        raise NotImplementedError

    def terms(self, pairs: Iterable[tuple[str, str]]) -> Iterable[str]:
        raise NotImplementedError

    def options(self, command: Command) -> Iterable[str]:
        raise NotImplementedError


class _Roff(_Writer):
    def heading(self, title: str, *, deeper: bool = False) -> Iterable[str]:
        return [f".SS {roff.escape(title)}" if deeper else f".SH {roff.escape(title.upper())}"]

    def synopsis(self, command: Command) -> Iterable[str]:
        yield f'.SY "{roff.escape(" ".join(command.words), code=True)}"'
        for word in command.synopsis:
            yield roff.guard(_typeset(word).replace(" ", "\\ "))
        yield ".YS"

    def text(self, markdown: str) -> Iterable[str]:
        return roff.render(_with_includes(markdown))

    def terms(self, pairs: Iterable[tuple[str, str]]) -> Iterable[str]:
        for term, text in pairs:
            name, _, rest = term.partition("(")
            head = roff.bold(name) + (f"({rest}" if rest else "")
            yield from roff.tagged(head, roff.escape(text))

    def options(self, command: Command) -> Iterable[str]:
        for option in _documented(command):
            head = ", ".join(roff.bold(name) for name in option.names)
            value = roff.italic(option.value) if option.value else ""
            yield from roff.tagged(" ".join(filter(None, (head, value))), _code_in(option.help))


class _Markdown(_Writer):
    def heading(self, title: str, *, deeper: bool = False) -> Iterable[str]:
        return ["", f"{'###' if deeper else '##'} {title}", ""]

    def synopsis(self, command: Command) -> Iterable[str]:
        start = " ".join(command.words) + " "
        # Words stay whole: their blanks are no place to break at.
        words = " ".join(word.replace(" ", "\xa0") for word in command.synopsis)
        indent = " " * len(start)
        text = textwrap.fill(start + words, 88, subsequent_indent=indent, break_on_hyphens=False)
        return ["", "```text", text.replace("\xa0", " "), "```", ""]

    def text(self, markdown: str) -> Iterable[str]:
        links = _INCLUDE.sub(lambda match: f"See [{match[1]}]({match[1]}).\n", markdown)
        known = {f"{path.stem[:-2]}({path.stem[-1]})": path.name for path in SOURCES.glob("*.md")}
        for reference, target in known.items():
            links = re.sub(
                rf"(?<![\w/-]){re.escape(reference)}(?! *\n?\[)", f"[{reference}]({target})", links
            )
        return ["", links]

    def terms(self, pairs: Iterable[tuple[str, str]]) -> Iterable[str]:
        for term, text in pairs:
            yield from self.text(f"**{term}**")
            yield f":   {text}"

    def options(self, command: Command) -> Iterable[str]:
        for option in _documented(command):
            head = ", ".join(option.names)
            yield from ("", f"`{' '.join(filter(None, (head, option.value)))}`", "")
            yield f":   {option.help or 'its name'}"


def _documented(command: Command) -> tuple[Option, ...]:
    """What its page lists: actions of a command have --help as well, which is said once."""
    inner = len(command.words) > 2
    options = [o for o in command.options if not (inner and "--help" in o.names)]
    return (*command.arguments, *options)


def _typeset(word: str) -> str:
    """A word of the synopsis: options bold, what stands for a value in italics."""

    def one(match: re.Match[str]) -> str:
        text = match[0]
        return roff.bold(text) if text.startswith("-") else roff.italic(text)

    return re.sub(r"--?[a-z][a-z-]*|--|[A-Za-z](?:[\w:|,-]|\[:P\w*\])*(?:\.\.\.)?", one, word)


def _code_in(text: str) -> str:
    """Help text, in which `...` is code and --option an option."""
    parts = re.split(r"(`[^`]+`|--[a-z][a-z-]*)", text)
    return "".join(
        roff.bold(part.strip("`")) if index % 2 else roff.escape(part)
        for index, part in enumerate(parts)
    )


def _sentence(text: str) -> str:
    return text if text.endswith(".") else text[:1].upper() + text[1:] + "."


def _with_includes(markdown: str) -> str:
    """With the documents that it asks for, their title left out, their headings one level down."""

    def included(match: re.Match[Literal[""] | str]) -> str:
        text = (SOURCES / match[1]).read_text(encoding="utf-8").partition("\n")[2]
        return re.sub(r"^#", "##", text, flags=re.MULTILINE)

    return _INCLUDE.sub(included, markdown)


# ---------------------------------------------------------------------------- sources


def load(source: Path, command: Command | None) -> Page:
    """One page from its text.

    Raises:
        PageError: the text is not made as it has to be.
    """
    name, section = source.stem[:-2], source.stem[-1]
    text = source.read_text(encoding="utf-8")
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    title, _, summary = head.partition("\n")
    if title != f"# {name}({section})":
        raise PageError(f"{source}: the first line has to be `# {name}({section})`")
    summary = " ".join(summary.split())
    if command is not None:
        if summary:
            raise PageError(f"{source}: the summary of a command is the parser's: leave it out")
        summary = command.summary
    texts = tuple(Section(part.partition("\n")[0], part.partition("\n")[2]) for part in parts)
    missing = [title for title in SECTIONS if title not in {text.title for text in texts}]
    if command is not None and missing:
        raise PageError(f"{source}: these sections are missing: {', '.join(missing)}")
    return Page(name, section, summary, texts, command)


def pages() -> list[Page]:
    """Every page.

    Raises:
        PageError: a command has no text, or a text no command.
    """
    top = whole()
    commands = {command.page: command for command in (top, *top.actions)}
    sources = {path.stem[:-2]: path for path in sorted(SOURCES.glob("*.md"))}
    if missing := sorted(commands.keys() - sources.keys()):
        raise PageError(
            f"write docs/man/{missing[0]}.1.md, with the sections {' and '.join(SECTIONS)}; "
            "see CONTRIBUTING.md"
        )
    unknown = [n for n, p in sources.items() if p.stem.endswith(".1") and n not in commands]
    if unknown:
        raise PageError(f"{sources[unknown[0]]}: there is no such command; remove it")
    return [load(path, commands.get(name)) for name, path in sources.items()]
