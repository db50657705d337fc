# SPDX-License-Identifier: Apache-2.0
"""TLS 1.3 in which both ends show certificates that the cluster's authority has signed.

An end that refuses a certificate tells the other end why. asyncio alone would close the connection
without that alert.
"""

from __future__ import annotations

import codecs
import ssl
from collections.abc import Callable
from typing import Any, Final

from infiniswap.control.pem import why_unusable
from infiniswap.control.roles import said, uris_in
from infiniswap.control.tls import HearingObject, bounded, load_pem

_READS_AFTER_REFUSAL: Final = 4
"""Of at most 16 KiB each. A peer has sent its first request before it can read that it was refused,
and a connection that is closed with something unread takes the alert with it."""

EXPIRED: Final = 10
NOT_YET_VALID: Final = 9
UNKNOWN_AUTHORITY: Final = frozenset({2, 7, 18, 19, 20, 21})
SELF_SIGNED: Final = 18
"""X509_V_ERR_..., x509_vfy.h."""
_NO_CHECK_TIME: Final = 0x20_0000
"""X509_V_FLAG_NO_CHECK_TIME."""


class RefusedCertificateError(ssl.SSLCertVerificationError):
    """The certificate of the other end does not count.

    Attributes:
        presented: the names in it, for a sentence; nobody has vouched for them.
    """

    presented: str

    @property
    def why(self) -> str:
        """As half a sentence."""
        return why_refused(self.verify_code, self.verify_message)


def why_refused(code: int, message: str) -> str:
    """What OpenSSL found, in our words."""
    if code == EXPIRED:
        return "has expired, or that of its authority has"
    if code == NOT_YET_VALID:
        return "is not valid yet"
    if code in UNKNOWN_AUTHORITY:
        return "was not signed by the authority of this cluster"
    return f"cannot be used ({message})"


class MutualContext(ssl.SSLContext):
    """A context whose connections explain themselves.

    Attributes:
        refused: told of each certificate that a server refuses, as a sentence.
    """

    refused: Callable[[str], None] | None = None


class _Explaining(HearingObject):
    """One connection. A server that refuses the other end's certificate lets the alert out first:
    it says that it waits for more, until the peer has closed or has sent enough."""

    _failure: ssl.SSLError | None = None
    _reads = 0

    def do_handshake(self) -> None:
        """See ssl.SSLObject."""
        if self._failure is not None:
            self._reads += 1
            if self._reads > _READS_AFTER_REFUSAL:
                raise self._failure
            raise ssl.SSLWantReadError
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError):
            raise
        except ssl.SSLCertVerificationError as error:
            refused = self._explained(error)
            if not self.server_side:
                raise refused from None
            # OpenSSL has dropped it by now at this end.
            self._refuse(refused, f"its certificate {refused.why}")
        except ssl.SSLError as error:
            if not self.server_side:
                raise
            if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                self._refuse(error, "it has shown no certificate: it may use a cluster secret")
            self._refuse(error, f"TLS failed ({error.reason})")

    def _refuse(self, error: ssl.SSLError, sentence: str) -> None:
        self._failure = error
        context: Any = self.context
        if isinstance(context, MutualContext) and context.refused is not None:
            context.refused(sentence)
        raise ssl.SSLWantReadError

    def _explained(self, error: ssl.SSLCertVerificationError) -> RefusedCertificateError:
        made = RefusedCertificateError(*error.args)
        made.verify_code, made.verify_message = error.verify_code, error.verify_message
        made.presented = said(uris_in(self._shown()))
        return made

    def _shown(self) -> bytes:
        """The certificate of the other end, unverified; empty where it has shown none."""
        return next(iter(_chain(self, "get_unverified_chain")), b"")


def verified_chain(end: ssl.SSLObject) -> tuple[bytes, ...]:
    """The certificates by which the other end was believed, in DER form: its own first, that of the
    authority last. Empty: it was not asked for one."""
    return _chain(end, "get_verified_chain")


def _chain(end: Any, getter: str) -> tuple[bytes, ...]:
    if hasattr(end, getter):  # Python 3.13
        return tuple(map(bytes, getattr(end, getter)() or ()))
    found = getattr(end._sslobj, getter)() or ()
    return tuple(ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in found)


def mutual_context(
    *, server: bool, authority: str, shown: bytes | None, check_time: bool = True
) -> MutualContext:
    """A context that trusts one authority and nobody else. Blocking, for a moment.

    Args:
        server: whether it is for the end that is connected to.
        authority: certificates in PEM form.
        shown: our certificate, what lies between it and the authority, and its key, in PEM form;
            None: we show none.
        check_time: whether certificates that are out of date are refused.

    Raises:
        ValueError: something cannot be used; says what.
    """
    if not server:
        codecs.lookup("idna")  # of the server's name, as for tls.client_context
    context = MutualContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    bounded(context)
    context.sslobject_class = _Explaining
    context.check_hostname = False  # an address is no identity
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0
    if not check_time:
        context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    try:
        context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(why_unusable(error)) from None
    if not context.get_ca_certs():
        raise ValueError("no certificate in it is one of an authority")
    if shown is not None:
        load_pem(context, shown)
    return context


def names_at(
    shower: ssl.SSLContext, looker: ssl.SSLContext
) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """What the looker reads in the certificate that the shower shows it, and why it believes that
    (verified_chain): a handshake in memory, as `ssl` decodes only certificates that were verified.

    Raises:
        RefusedCertificateError, ssl.SSLError: it does not accept the certificate.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    looks_as_server = looker.protocol == ssl.PROTOCOL_TLS_SERVER
    ends = (
        shower.wrap_bio(there, back, server_side=not looks_as_server),
        looker.wrap_bio(back, there, server_side=looks_as_server),
    )
    for _ in range(6):  # more than a handshake takes
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                failure = getattr(end, "_failure", None)
                if failure is not None:
                    raise failure from None
    found = ends[1].getpeercert()
    assert found is not None
    return found, verified_chain(ends[1])
