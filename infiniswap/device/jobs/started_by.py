# SPDX-License-Identifier: Apache-2.0
"""Who starts a device, and with which program: what donors list beside its lease."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from typing import Final

from infiniswap.control.text import clean_text
from infiniswap.device.spec.spec import StartedBy
from infiniswap.fields import LABEL_LENGTH_MAX

_UID_MAX: Final = (1 << 32) - 2


def started_by(environ: Mapping[str, str], uid: int, program: str = "") -> StartedBy:
    """For a command of this user.

    Args:
        environ: of this process; says who called sudo.
        uid: of this process.
        program: of the job, as it was written; its arguments are nobody's business.
    """
    said = environ.get("SUDO_UID", "")
    if uid == 0 and said.isdecimal() and said.isascii() and int(said) <= _UID_MAX:
        uid = int(said)
    return StartedBy(job=label(os.path.basename(program)), user=label(_name_of(uid)), uid=uid)


def label(text: str) -> str:
    """The text as donors may show it: printable, in one line, cut to length."""
    return clean_text(text, LABEL_LENGTH_MAX).strip()


def _name_of(uid: int) -> str:
    """Empty: nobody of this host."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""
