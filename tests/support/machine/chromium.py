# SPDX-License-Identifier: Apache-2.0
"""A page in the distribution's Chromium, without a window."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

EXECUTABLE = "/usr/bin/chromium"
WAIT_MS = 30_000
"""Of every wait for something that must come."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser."""
    # As root it has no sandbox; containers have a small /dev/shm.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=EXECUTABLE, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """A page that is watched.

    Attributes:
        page: of playwright.
        complaints: what the browser has written to its console, errors of scripts and of the
            policy among it.
        hosts: that the page has asked for anything.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, context: BrowserContext) -> Seen:
        """A new tab."""
        context.set_default_timeout(WAIT_MS)
        made = cls(context.new_page())
        made.page.on("console", lambda message: made.complaints.append(message.text))
        made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
        made.page.on("request", lambda request: made.hosts.add(request.url.split("/")[2]))
        return made

    def inaccessible(self) -> list[str]:
        """What axe finds, as sentences."""
        found: Any = Axe().run(self.page, options={"resultTypes": ["violations"]}).response
        return [
            f"{rule['id']}: {rule['help']}: {node['target']} {node.get('failureSummary', '')}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]
