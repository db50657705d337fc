# SPDX-License-Identifier: Apache-2.0
"""A small certificate authority for a cluster: its own certificate, and those of hosts.

    DIR/ca.pem       certificate of the authority, for every host
        ca-key.pem   its key: whoever has it decides who belongs to the cluster

Any other authority does as well; what a host's certificate has to say: infiniswap.control.roles.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from infiniswap.control.own_certificate import DEVICE, DONOR
from infiniswap.control.roles import Role, uri

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA_FILE: Final = "ca.pem"
CA_KEY_FILE: Final = "ca-key.pem"
CERTIFICATE_FILE: Final = "certificate.pem"
KEY_FILE: Final = "key.pem"

AUTHORITY_DAYS: Final = 3650

_EARLIER: Final = datetime.timedelta(days=1)
"""The clocks of two hosts differ."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM form."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Period:
    """When a certificate counts."""

    since: datetime.datetime
    until: datetime.datetime


def period(days: float, now: datetime.datetime | None = None) -> Period:
    """From a day ago, for hosts whose clock is behind, until so many days from now."""
    now = now or datetime.datetime.now(datetime.UTC)
    return Period(now - _EARLIER, now + datetime.timedelta(days=days))


def new_authority(cluster: str, when: Period | None = None) -> Pair:
    """An authority that signs for hosts, and for no further authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Infiniswap cluster {cluster}"[:64])
    builder = _builder(name, name, key.public_key(), when or period(AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    return Pair(_signed(builder, key), _key_text(key))


def new_certificate(
    authority: Pair,
    cluster: str,
    host: str,
    roles: Iterable[Role],
    when: Period,
) -> Pair:
    """A key, and a certificate for a host in these roles.

    Args:
        authority: signs it.
        cluster, host: their names.
        roles: at least one.
        when: it counts.

    Raises:
        ValueError: authority or names cannot be used; says why.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    made = _certificate(authority, cluster, host, roles, when, key.public_key())
    return Pair(made, _key_text(key))


def new_request() -> Pair:
    """A key, and a request (PKCS #10) for its certificate: the key stays on its host. The request
    names nobody, because the authority decides whom it is for."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    made = request.sign(key, hashes.SHA256())
    return Pair(made.public_bytes(serialization.Encoding.PEM), _key_text(key))


def sign_request(
    authority: Pair,
    cluster: str,
    host: str,
    roles: Iterable[Role],
    when: Period,
    request: bytes,
) -> bytes:
    """A certificate for the key of a request. What else the request says does not count.

    Raises:
        ValueError: as `new_certificate`, or the request cannot be used; says why.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        found = x509.load_pem_x509_csr(request)
        public = found.public_key()
        is_right = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("the request for a certificate is none") from None
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp256r1":
        raise ValueError("the key in the request is not one of the curve P-256")
    if not is_right:
        raise ValueError("whoever made the request does not have its key")
    return _certificate(authority, cluster, host, roles, when, public)


def _certificate(
    authority: Pair,
    cluster: str,
    host: str,
    roles: Iterable[Role],
    when: Period,
    public: ec.EllipticCurvePublicKey,
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    roles = list(roles)
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(uri(cluster, role, host)) for role in roles
    ]
    for role, shower in ((Role.DONOR, DONOR), (Role.CONSUMER, DEVICE)):
        if role in roles:
            names.append(x509.DNSName(shower.name))
    signer = x509.load_pem_x509_certificate(authority.certificate)
    signer_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(signer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("its key is not one for elliptic curves")
    if signer_key.public_key() != signer.public_key():
        raise ValueError("certificate and key do not belong together")
    end = signer.not_valid_after_utc
    if when.until.replace(microsecond=0) > end:
        raise ValueError(
            f"the authority itself is good until {end:%F} only: give fewer --days, or make another "
            "authority"
        )
    builder = _builder(_name(host), signer.subject, public, when)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()),
            critical=False,
        )
    )
    return _signed(builder, signer_key)


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, when: Period
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(when.since)
        .not_valid_after(when.until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    from cryptography import x509

    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: name in allowed for name in every})


def _signed(builder: x509.CertificateBuilder, signer_key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    made = builder.sign(signer_key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
