# SPDX-License-Identifier: Apache-2.0
"""The distribution's Chromium, without a window: for pictures, and for tests of the page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from playwright.sync_api import Browser, sync_playwright

EXECUTABLE: Final = "/usr/bin/chromium"


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
