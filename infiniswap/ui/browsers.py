# SPDX-License-Identifier: Apache-2.0
"""Which requests of browsers are answered, and the headers of every answer. Pure.

A page of another site, in a browser that can reach a daemon, must not read from it:

- The address that the browser asked for must be a name of this host (Host). Else a site could give
  its own name this host's address (DNS rebinding), and its pages would be of the same origin.
- A WebSocket must come from this page (Origin): browsers let any page open one anywhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Final

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Of every answer below /ui."""

LOCAL_NAME: Final = "localhost"
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::(\d{1,5}))?")


def host_problem(host: str, names: Collection[str]) -> str:
    """Why a request for that address is refused; empty: it is not.

    Args:
        host: the header Host.
        names: of this host, in lower case, besides every address in figures.
    """
    found = _HOST.fullmatch(host)
    name = found[1].lower().rstrip(".") if found else ""
    if name == LOCAL_NAME or name in names or _is_address(name):
        return ""
    return (
        "this daemon answers browsers that ask for its address in figures or for this host's own "
        "name, and the browser asked for another name. Open the page by the address in figures."
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def origin_problem(origin: str | None, host: str, *, is_needed: bool) -> str:
    """Why a request of that page is refused; empty: it is not.

    Args:
        origin: the header Origin; None: there is none.
        host: the header Host.
        is_needed: the request cannot come from this page without one.
    """
    if origin is None:
        return "only the page /ui may open this WebSocket" if is_needed else ""
    if origin.lower() == f"https://{host.lower()}":
        return ""
    return "a page of another origin asks"
