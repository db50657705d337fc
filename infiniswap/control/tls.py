# SPDX-License-Identifier: Apache-2.0
"""TLS 1.3 on the control port: contexts, the digest of a certificate, and bounded buffers.

No certificate is trusted here (infiniswap.control.mutual does that). Each end binds its proof of
the cluster secret to the digest of the server's certificate (infiniswap.control.auth), so an end in
the middle, which has to show another certificate, can forward no proof.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
import ssl
from asyncio import constants, sslproto
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from infiniswap.control import pem
from infiniswap.errors import ProtocolMismatchError

if TYPE_CHECKING:
    import asyncio

    from infiniswap.control.channel import WebSocket

_RECORD_BYTES: Final = 16 * 1024
"""Longest TLS record. asyncio takes a buffer of 256 KiB for each connection otherwise, in a process
that is locked in memory."""
_UNREAD_KIB: Final = 32
"""Kept of a connection in each direction before this end waits. asyncio's values are 512 KiB of
what the peer does not read, and 256 KiB of what this process does not."""

_RECORD_HEAD_BYTES: Final = 5
"""Type, version, length (two bytes)."""

FIRST_BYTE: Final = 0x16
"""Of every TLS connection: a handshake record."""
FULL: Final = bytes((21, 3, 3, 0, 2, 2, 49))
"""The TLS alert "access denied", before any handshake: too many connections are open."""
FULL_REASON: Final = "ALERT_ACCESS_DENIED"
"""Part of OpenSSL's reason for an error by that alert."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server needs.

    Attributes:
        context: with key and certificate.
        certificate: in DER form.
        cluster: whose certificates clients have to show; empty: they show none, and prove the
            cluster secret.
        authorities: those that are trusted, as `digest_of` their certificates.
    """

    context: ssl.SSLContext
    certificate: bytes
    cluster: str = ""
    authorities: frozenset[bytes] = frozenset()

    @property
    def digest(self) -> bytes:
        """Of the certificate; proofs cover it."""
        return digest_of(self.certificate)


def is_record(data: bytes) -> bool:
    """Whether these first bytes of a connection contain a whole record, or more than any has."""
    length = int.from_bytes(data[3:_RECORD_HEAD_BYTES])
    return len(data) >= _RECORD_HEAD_BYTES + min(length, _RECORD_BYTES)


def server_tls(text: bytes) -> ServerTls:
    """For a key and its certificate, in one PEM text; others after it, of who signed it, are shown
    to clients as well. Blocking.

    Raises:
        ValueError: they cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # No connection is resumed: each session brings its own proof.
    context.num_tickets = 0
    return ServerTls(context, load_pem(context, text))


def load_pem(context: ssl.SSLContext, text: bytes) -> bytes:
    """Has a context show the certificates of a text, which has the key of the first as well.

    Returns:
        The first certificate, in DER form.

    Raises:
        ValueError: they cannot be used.
    """
    # The first one is our own: SSL_CTX_use_certificate_chain_file(3).
    own = pem.der(pem.certificates(text)[0])
    pem.check_key(text)
    # OpenSSL reads files only, and the key shall be in none that others may see.
    descriptor = os.memfd_create("infiniswap-key")
    try:
        os.write(descriptor, text)
        # OpenSSL would ask the terminal for a password.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
    except OSError as error:  # as ssl.SSLError is
        raise ValueError(pem.why_unusable(error)) from None
    finally:
        os.close(descriptor)
    return own


def _no_password() -> str:
    raise ValueError("its key is encrypted, and nobody is there to give the password")


class HearingObject(ssl.SSLObject):
    """A connection that remembers which alert has ended it: the other end has refused our
    certificate, or asks for one. aiohttp forgets that when it tries again.

    Attributes:
        alert: OpenSSL's name for it; empty: none.
    """

    alert: str = ""

    def read(self, *args: Any, **options: Any) -> Any:
        """See ssl.SSLObject."""
        try:
            return super().read(*args, **options)
        except ssl.SSLError as error:
            if error.reason and "ALERT" in error.reason:
                self.alert = error.reason
            raise


def client_context() -> ssl.SSLContext:
    """For connections to donors. It trusts whoever answers: the proof decides. Whatever the first
    connection needs is loaded now: a successor must not read a file when its turn has come."""
    codecs.lookup("idna")  # of the server's name, also where that is an address
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.sslobject_class = HearingObject
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    bounded(context)
    return context


def bounded(context: ssl.SSLContext) -> None:
    """TLS 1.3 alone, and bounded buffers."""
    # asyncio offers no other way: these hold for every connection of this process.
    sslproto.SSLProtocol.max_size = _RECORD_BYTES
    constants.FLOW_CONTROL_HIGH_WATER_SSL_WRITE = _UNREAD_KIB  # type: ignore[misc]
    constants.FLOW_CONTROL_HIGH_WATER_SSL_READ = _UNREAD_KIB  # type: ignore[misc]
    context.minimum_version = ssl.TLSVersion.TLSv1_3


def abort(transport: asyncio.WriteTransport) -> None:
    """Ends a connection at once. asyncio would wait half a minute for the peer to agree to the end
    of TLS, and for ever for it to read what is still to be sent."""
    with contextlib.suppress(AttributeError):  # Python 3.11.2 of Debian 12, where it closed twice
        transport.abort()


def peer_digest(connection: WebSocket | asyncio.BaseTransport | None) -> bytes:
    """Digest of the certificate that the server at the other end has shown.

    Raises:
        ProtocolMismatchError: the connection is not TLS, or has been closed.
    """
    found = connection.get_extra_info("ssl_object") if connection is not None else None
    certificate = None if found is None else found.getpeercert(binary_form=True)
    if not certificate:
        raise ProtocolMismatchError("the connection ended before the donor's certificate was read")
    return digest_of(certificate)


def digest_of(certificate: bytes) -> bytes:
    """SHA-256 of a certificate in DER form."""
    return hashlib.sha256(certificate).digest()
