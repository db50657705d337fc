# SPDX-License-Identifier: Apache-2.0
"""When certificates count, and what is to be said when they do not, or not much longer. Pure."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from infiniswap.control.text import clean_text
from infiniswap.documents import page

_DAY_S: Final = 86_400.0
_AUTHORITY_S: Final = 60 * _DAY_S
"""How long before the end of an authority's certificate that is told, if its life is not short: all
hosts of the cluster need other certificates by then."""
_RENEW: Final = (
    "Get another certificate from the authority, put it in place of the old one, and reload the "
    "daemon and the devices."
)
_REPLACE: Final = (
    "Make another authority, and let all hosts trust both while they get certificates of the new "
    f"one ({page('security.md')})."
)


@dataclass(frozen=True, slots=True)
class Dated:
    """A certificate that counts for a while.

    Attributes:
        what: it is, for sentences.
        since_s, until_s: when it counts, in Unix time.
        early_s: how long before its end a warning is due.
        mend: what to do about its end.
    """

    what: str
    since_s: float
    until_s: float
    early_s: float
    mend: str

    def problem(self, now_s: float) -> str:
        """Why it does not count now; empty: it does."""
        if now_s > self.until_s:
            return f"{self.what} has expired, on {day(self.until_s)}"
        if now_s < self.since_s:
            return (
                f"{self.what} is not valid before {day(self.since_s)}, and the clock of this host "
                f"says {day(now_s)}"
            )
        return ""

    def warning(self, now_s: float) -> str:
        """As problem; also a sentence when its end is near."""
        left_s = self.until_s - now_s
        if (problem := self.problem(now_s)) or left_s >= self.early_s:
            return problem
        return f"{self.what} expires in {_span(left_s)}, on {day(self.until_s)}"


def host_certificate(names: str, decoded: Mapping[str, Any]) -> Dated:
    """Of this host, as `ssl` has decoded it; `names`: in it."""
    return _made(f"the certificate of this host ({names})", decoded, math.inf, _RENEW)


def authority_certificate(decoded: Mapping[str, Any]) -> Dated:
    """Of an authority, as `ssl` has decoded it."""
    parts = [value for group in decoded.get("subject", ()) for _, value in group]
    name = clean_text(", ".join(parts), 128) or "without a name"
    what = f"the certificate of the authority ({name})"
    return _made(what, decoded, _AUTHORITY_S, _REPLACE)


def _made(what: str, decoded: Mapping[str, Any], early_s: float, mend: str) -> Dated:
    """A warning is due in the last third of its life, `early_s` before its end at the earliest."""
    since_s = float(ssl.cert_time_to_seconds(decoded["notBefore"]))
    until_s = float(ssl.cert_time_to_seconds(decoded["notAfter"]))
    return Dated(what, since_s, until_s, min((until_s - since_s) / 3, early_s), mend)


def day(unix_s: float) -> str:
    """A time as people write it, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def _span(seconds: float) -> str:
    for size, unit in ((_DAY_S, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
