# SPDX-License-Identifier: Apache-2.0
"""Pictures by Chromium: of the page of a daemon, and of a terminal's text."""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path
from typing import Any, Final

from PIL import Image
from playwright.sync_api import Browser
from rich.console import Console
from rich.text import Text

from pictures.browser import chromium

PAGE_SIZE: Final = {"width": 1000, "height": 800}
_SEEN_S: Final = 75
"""How long the page is open before its picture: the charts need a past."""
_WAIT_MS: Final = 60_000
_COLOURS: Final = 128
_SVG: Final = """<svg viewBox="0 0 {terminal_width} {terminal_height}" width="{terminal_width}"
 height="{terminal_height}" xmlns="http://www.w3.org/2000/svg"><style>{styles}
 .{unique_id}-matrix {{ font: {char_height}px monospace; }}</style>
 <rect width="100%" height="100%" fill="#1c2026"/>
 <g transform="translate(8, 4)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>"""
"""Of rich's own, without the window around it and without fonts of another host."""


def page(browser: Browser, link: str, into: dict[str, Path]) -> None:
    """The page in each colour scheme.

    Args:
        browser: of playwright.
        link: lets it in.
        into: files by scheme.
    """
    context = browser.new_context(ignore_https_errors=True, viewport=PAGE_SIZE)  # type: ignore[arg-type]
    tab = context.new_page()
    tab.set_default_timeout(_WAIT_MS)
    tab.goto(link)
    tab.locator(".cell:not(.unmapped)").first.wait_for()
    tab.wait_for_timeout(_SEEN_S * 1000)
    # A cluster at work, and not one whose jobs have all that they need.
    tab.get_by_text(re.compile(r"in from donors [1-9]")).first.wait_for()
    for scheme, path in into.items():
        chosen: Any = scheme
        tab.emulate_media(color_scheme=chosen)
        tab.screenshot(path=path, full_page=True)
        shrink(path)


def terminal(browser: Browser, text: str, columns: int, path: Path) -> None:
    """A terminal's text with its escape sequences."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), crop=True, no_wrap=True)
    svg = console.export_svg(title="", code_format=_SVG)
    tab = browser.new_page()
    tab.set_content(svg)
    tab.locator("svg").screenshot(path=path)
    shrink(path)


def shrink(path: Path) -> None:
    """Keeps as many colours as such a picture needs."""
    with Image.open(path) as picture:
        fewer = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    fewer.save(path, optimize=True)


def main() -> int:
    """Of what the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", required=True)
    parser.add_argument("--light", type=Path, required=True)
    parser.add_argument("--dark", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--columns", type=int, required=True)
    parser.add_argument("--top", type=Path, required=True)
    args = parser.parse_args()
    with chromium() as browser:
        terminal(browser, args.text.read_text(encoding="utf-8"), args.columns, args.top)
        page(browser, args.link, {"light": args.light, "dark": args.dark})
    return 0


if __name__ == "__main__":
    sys.exit(main())
