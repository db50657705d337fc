# SPDX-License-Identifier: Apache-2.0
"""Who gets an invitation: the first who shows its password in time, and nobody after that.

    OPEN ── the password, in time ──▶ GIVEN
      └──── ten minutes later ──────▶ late

Whoever does not show the password learns nothing of the state, and ends nothing: nobody guesses 128
random bits, and a limit would let a stranger at the guest's address keep the guest out. Pure: the
caller passes the time in.
"""

from __future__ import annotations

import enum
import hmac
from typing import Final

LIFETIME_S: Final = 600.0


class Verdict(enum.StrEnum):
    """What somebody who came gets."""

    GIVEN = "given"
    PREVIEWED = "previewed"
    WRONG = "wrong"
    USED = "used"
    LATE = "late"


class Invitation:
    """One invitation.

    Args:
        password: whoever shows it is invited.
        now_s: the time, of a clock that nobody sets.
        lifetime_s: how long it is good for.

    Attributes:
        given_to: the host that has it; empty: nobody.
        wrong: passwords shown that were not its own.
    """

    def __init__(self, password: bytes, now_s: float, lifetime_s: float = LIFETIME_S) -> None:
        self.given_to = ""
        self._password = password
        self._until_s = now_s + lifetime_s
        self.wrong = 0

    def left_s(self, now_s: float) -> float:
        """How long it is still good for; 0: no longer."""
        return max(0.0, self._until_s - now_s)

    def present(self, password: bytes, host: str, now_s: float, *, preview: bool) -> Verdict:
        """Somebody shows a password.

        Args:
            password: what was shown.
            host: who shows it.
            now_s: the time.
            preview: asks what the invitation would give, and leaves it open.
        """
        if not hmac.compare_digest(password, self._password):
            self.wrong += 1
            return Verdict.WRONG
        if self.given_to:
            return Verdict.USED
        if not self.left_s(now_s):
            return Verdict.LATE
        if preview:
            return Verdict.PREVIEWED
        self.given_to = host
        return Verdict.GIVEN
