# SPDX-License-Identifier: Apache-2.0
"""A page in a browser of pictures.browser, and what it complains of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page

WAIT_MS = 30_000
"""Of every wait for something that must come."""


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
