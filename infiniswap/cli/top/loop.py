# SPDX-License-Identifier: Apache-2.0
"""Asks, draws and reads keys, until a key ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.live import Live

from infiniswap.cli.common.output import plain_console
from infiniswap.cli.top.view import SECTIONS, Seen, Window, draw, last_row
from infiniswap.control.access import client_config
from infiniswap.device.control.listing import local_devices
from infiniswap.discovery.find import Found, find
from infiniswap.errors import InfiniswapError
from infiniswap.watch.asking import ask, local_donor
from infiniswap.watch.changes import between
from infiniswap.watch.picture import Picture, look

if TYPE_CHECKING:
    from infiniswap.config import Config
    from infiniswap.watch.asking import AskedDonor

LOOK_S: Final = 2.0
"""Between two looks; an answer takes a donor a few ms."""
_FIND_S: Final = 30.0
"""Between two questions to the broker."""
_TOLD_MAX: Final = 500
_PAGE_ROWS: Final = 10

_ARROWS: Final = {
    b"\x1b[A": -1, b"\x1bOA": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"k": -1, b"j": 1,
    b"\x1b[5~": -_PAGE_ROWS, b"\x1b[6~": _PAGE_ROWS,
}  # fmt: skip
_ENDS: Final = (b"q", b"Q", b"\x03", b"\x04")


def pressed(window: Window, key: bytes) -> Window | None:
    """The window after a key; None: it ends the command. Pure."""
    if key in _ENDS:
        return None
    if key in (b"p", b"P", b" "):
        return replace(window, is_paused=not window.is_paused)
    if key.isdigit() and int(key) <= len(SECTIONS):
        return replace(window, focus=int(key), first=0)
    if key in _ARROWS:
        return replace(window, first=max(0, window.first + _ARROWS[key]))
    return window


class Viewer:
    """One reader's view.

    Args:
        config: names the donors.
        console: of the terminal.
    """

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._client = client_config(config, config.cluster.ask_s)
        self._console = console
        self._found: Found | None = None
        self._found_at_s = 0.0
        self._picture: Picture | None = None
        self._told: deque[Seen] = deque(maxlen=_TOLD_MAX)
        self._window = Window(0, 0)
        self.ended = asyncio.Event()

    async def look(self) -> None:
        """Asks everybody once."""
        now_s = time.monotonic()
        if self._found is None or now_s - self._found_at_s >= _FIND_S:
            self._found = await self._find(self._found)
            self._found_at_s = now_s
        device = self._config.device
        rows, devices = await asyncio.gather(
            self._ask(self._found),
            asyncio.to_thread(local_devices, device.run_dir, device.backup_dir),
        )
        before = self._picture
        self._picture = look(before, rows, devices, self._found.problems, time.monotonic())
        clock = time.strftime("%H:%M:%S")
        if before is not None:
            self._told += (Seen(clock, event) for event in between(before, self._picture))
        self._window = replace(self._window, clock=clock)

    async def _find(self, before: Found | None) -> Found:
        """Which donors there are. Where the list of peers cannot be read, the donors found last
        stay."""
        try:
            return await asyncio.to_thread(find, self._config)
        except InfiniswapError as error:
            if before is None:
                raise
            return replace(before, failure=error)

    async def _ask(self, found: Found) -> list[AskedDonor]:
        # Without any known donor this host may be one; if it is not, that is no error.
        asked = found.addresses or (self._config.daemon.listen,)
        rows = await ask(asked, self._client, local_donor(self._config))
        return rows if found.addresses else [row for row in rows if row.status is not None]

    async def looks(self, live: Live) -> None:
        """Until cancelled: looks and draws."""
        while True:
            if not self._window.is_paused:
                await self.look()
            self.draw(live)
            await asyncio.sleep(LOOK_S)

    def draw(self, live: Live) -> None:
        """What is known now, in the window as it is now."""
        size = self._console.size
        self._window = replace(self._window, columns=size.width, lines=size.height)
        live.update(Group(*draw(self._picture, list(self._told), self._window)), refresh=True)

    def key(self, live: Live) -> None:
        """Reads what was typed."""
        try:
            typed = os.read(sys.stdin.fileno(), 64)
        except OSError:
            typed = b""  # the terminal is gone
        for key in split(typed):
            window = pressed(self._window, key)
            if window is None:
                self.ended.set()
                return
            if self._picture is not None:  # as far as there are rows
                last = last_row(self._picture, list(self._told), window.focus)
                window = replace(window, first=min(window.first, last))
            self._window = window
        self.draw(live)


def split(typed: bytes) -> Iterator[bytes]:
    """Keys one by one. An empty input is the end of the terminal, and ends the command."""
    if not typed:
        yield _ENDS[0]
    while typed:
        sequence = next((one for one in _ARROWS if len(one) > 1 and typed.startswith(one)), None)
        length = len(sequence) if sequence else 1
        yield typed[:length]
        typed = typed[length:]


@contextlib.contextmanager
def _keys_at_once(fd: int) -> Iterator[None]:
    """Keys come without Return and are not echoed; Ctrl-C stays a signal."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def watch(config: Config) -> None:
    """Draws until q or Ctrl-C; the terminal is then as it was.

    Raises:
        InfiniswapError: the configuration cannot be used.
    """
    console = plain_console()
    own = Viewer(config, console)
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    with (
        _keys_at_once(fd),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        own.draw(live)
        loop.add_reader(fd, own.key, live)
        loop.add_signal_handler(signal.SIGWINCH, own.draw, live)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, own.ended.set)
        looks = asyncio.create_task(own.looks(live), name="looks")
        ended = asyncio.create_task(own.ended.wait(), name="end")
        try:
            await asyncio.wait({looks, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(fd)
            for task in (looks, ended):
                task.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            result = (await asyncio.gather(looks, return_exceptions=True))[0]
    if isinstance(result, Exception):
        raise result
