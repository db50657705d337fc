# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys as PEM text: what is in it, or why it cannot be used. Pure.

OpenSSL says "PEM lib" of a file that is cut short as of one that holds something else.
"""

from __future__ import annotations

import binascii
import re
import ssl
from typing import Final

_CERTIFICATE: Final = re.compile(
    b"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)
_CERTIFICATE_BEGINS: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.+?-----END \1-----", re.DOTALL)
_KEY_BEGINS: Final = re.compile(b"-----BEGIN [A-Z ]*PRIVATE KEY")


def certificates(text: bytes) -> tuple[bytes, ...]:
    """Each certificate of a text, in PEM form, without what stands around it.

    Raises:
        ValueError: there is none, or one is cut short; says so.
    """
    found = tuple(_CERTIFICATE.findall(text))
    if _CERTIFICATE_BEGINS not in text:
        raise ValueError("there is no certificate in PEM form in it")
    if text.count(_CERTIFICATE_BEGINS) != len(found):
        raise ValueError("it is cut short: a certificate in it has no end")
    return found


def der(certificate: bytes) -> bytes:
    """One certificate of a text in DER form.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))
    except (ValueError, binascii.Error):
        raise ValueError("a certificate in it is damaged") from None


def check_key(text: bytes) -> None:
    """Looks for a key, whatever is in it.

    Raises:
        ValueError: there is none, or it is cut short; says so.
    """
    if not _KEY_BEGINS.search(text):
        raise ValueError("there is no private key in PEM form in it")
    if not _KEY.search(text):
        raise ValueError("it is cut short: the key in it has no end")


def why_unusable(error: Exception) -> str:
    """Why OpenSSL takes no certificate, or no key, out of a text that is complete."""
    reason = str(getattr(error, "reason", None) or "")
    if reason == "KEY_VALUES_MISMATCH":
        return "certificate and key do not belong together"
    if reason:
        return f"OpenSSL refuses it: {reason.lower().replace('_', ' ')}"
    return "a certificate or the key in it is damaged" if isinstance(error, OSError) else str(error)
