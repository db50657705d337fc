# SPDX-License-Identifier: Apache-2.0
"""What the inviting host gives: all that its cluster has, and in a preview no secret."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from infiniswap import config as configuration
from infiniswap.control.roles import Role
from infiniswap.donor.authority import Pair, new_authority, new_request, period, sign_request
from infiniswap.errors import ConfigError, DonorRefusedError, UsageError
from infiniswap.invitation.messages import VERSION, InvitationRequest
from infiniswap.invitation.offer import Signing, Terms, terms
from infiniswap.keys import derive, parse
from infiniswap.secret import new_secret
from infiniswap.units import MIB, HostPort

SECRET, SECOND, PASSWORD = new_secret(), new_secret(), "broker's password"
REQUEST = InvitationRequest(VERSION, bytes(16), "h2")
OWN = (HostPort("10.0.0.2", 9400), HostPort("fd00::2", 9400))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in (("secret", SECRET), ("second", SECOND), ("password", PASSWORD)):
        (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / name).chmod(0o600)
    return tmp_path


def given(place: Path, text: str, *, session_key: bool = False) -> Terms:
    """Terms of a host with this configuration."""
    path = place / "infiniswap.toml"
    path.write_text(f'[cluster]\nsecret_file = "{place}/secret"\n{text}')
    config = configuration.load(path, {}, {})
    return terms(config, path, "h1", OWN, None, session_key=session_key)


def test_the_address_that_let_the_guest_in_is_the_donors(place: Path) -> None:
    found = given(place, 'peers = ["10.0.0.2", "127.0.0.1", "10.0.0.7"]\n')
    for reached, first in (("10.0.0.2", OWN[0]), ("fd00::2", OWN[1]), ("10.1.1.1", OWN[0])):
        offer = found.offer_to(REQUEST, reached)
        assert offer.peers == [str(first), "10.0.0.7:9400"]
        assert (offer.kind, offer.secret) == ("secret", SECRET)


BROKER = (
    'second_secret_file = "{0}/second"\ndiscovery = "mqtt"\n[daemon]\nslab = "64M"\n'
    '[mqtt]\nbroker = "{1}"\nusername = "u"\npassword_file = "{0}/password"\n'
)


def test_a_preview_has_no_secret_in_it(place: Path) -> None:
    found = given(place, BROKER.format(place, "b.example"))
    whole = found.offer_to(REQUEST, "10.0.0.2")
    assert (whole.second_secret, whole.slab_bytes) == (SECOND, 64 * MIB)
    assert whole.broker is not None
    assert (whole.broker.password, whole.broker.address) == (PASSWORD, "b.example:0")
    preview = msgspec.json.encode(
        found.offer_to(msgspec.structs.replace(REQUEST, preview=True), "10.0.0.2")
    )
    for secret in (SECRET, SECOND, PASSWORD):
        assert secret.encode() in msgspec.json.encode(whole)
        assert secret.encode() not in preview


def test_a_broker_on_the_inviting_host_is_named_by_its_address(place: Path) -> None:
    offer = given(place, BROKER.format(place, "localhost:1883")).offer_to(REQUEST, "fd00::2")
    assert offer.broker is not None
    assert offer.broker.address == "[fd00::2]:1883"


def test_with_the_session_key_nothing_more_goes_out(place: Path) -> None:
    text = f'second_secret_file = "{place}/second"\n'
    offer = given(place, text, session_key=True).offer_to(REQUEST, "10.0.0.2")
    assert offer.kind == "session-key"
    assert parse(offer.secret.encode()).session == derive(bytes.fromhex(SECRET)).session
    assert parse(offer.secret.encode()).operator is None
    sent = msgspec.json.encode(offer)
    assert SECRET.encode() not in sent
    assert SECOND.encode() not in sent
    # A host that has no more than that can give no more.
    (place / "secret").write_text(offer.secret)
    again = given(place, "").offer_to(REQUEST, "10.0.0.2")
    assert (again.kind, again.secret) == ("session-key", offer.secret)


def test_without_any_donor_the_guest_is_told(place: Path) -> None:
    path = place / "infiniswap.toml"
    config = configuration.load(Path("/dev/null"), {"cluster.secret_file": place / "secret"}, {})
    offer = terms(config, path, "h1", (), None).offer_to(REQUEST, "10.0.0.2")
    assert offer.peers == []
    assert "h1 knows no donor" in offer.notes[0]


def test_what_does_not_fit_the_cluster_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="is in no cluster yet"):
        terms(configuration.Config(), place / "infiniswap.toml", "h1", OWN, None)
    (place / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read"):
        given(place, "")
    (place / "secret").chmod(0o600)
    signing = Signing(new_authority("default"), "h", (Role.DONOR,), period(1))
    config = configuration.load(Path("/dev/null"), {"cluster.secret_file": place / "secret"}, {})
    with pytest.raises(UsageError, match="this one has a secret"):
        terms(config, place / "x", "h1", OWN, None, signing=signing)


# ----------------------------------------------------------------------------- certificates


def pem(request: x509.CertificateSigningRequest) -> bytes:
    return request.public_bytes(serialization.Encoding.PEM)


def made_request(kind: str) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if kind == "edwards":
        return pem(builder.sign(ed25519.Ed25519PrivateKey.generate(), None))
    if kind == "curve":
        return pem(builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()))
    if kind == "stolen":  # another host's public key, without the key that belongs to it
        own, other = (x509.load_pem_x509_csr(new_request().certificate) for _ in range(2))
        form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        mine, theirs = (each.public_key().public_bytes(*form) for each in (own, other))
        swapped = own.public_bytes(serialization.Encoding.DER).replace(mine, theirs)
        return pem(x509.load_der_x509_csr(swapped))
    return b"no request"


def signed(authority: Pair, request: bytes) -> bytes:
    return sign_request(authority, "default", "h2", [Role.CONSUMER], period(1), request)


def test_only_the_key_of_a_request_counts() -> None:
    authority, request = new_authority("default"), new_request()
    found = x509.load_pem_x509_certificate(signed(authority, request.certificate))
    found.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
    key = serialization.load_pem_private_key(request.key, None)
    assert found.public_key() == key.public_key()
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == ["infiniswap://default/consumer/h2"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("none", "is none"),
        ("edwards", "not one of the curve P-256"),
        ("curve", "not one of the curve P-256"),
        ("stolen", "does not have its key"),
    ],
)
def test_a_request_that_cannot_be_signed_is_refused(kind: str, why: str) -> None:
    authority = new_authority("default")
    with pytest.raises(ValueError, match=why):
        signed(authority, made_request(kind))


def test_a_guest_with_such_a_request_is_told_why(tmp_path: Path) -> None:
    authority = new_authority("default")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate)
    path = tmp_path / "infiniswap.toml"
    names = "".join(f'{name}_file = "{ca}"\n' for name in ("ca", "certificate", "key"))
    path.write_text(f"[cluster]\n{names}")
    signing = Signing(authority, "h2", (Role.CONSUMER,), period(1))
    found = terms(configuration.load(path, {}, {}), path, "h1", OWN, None, signing=signing)
    with pytest.raises(DonorRefusedError, match="no certificate was made: the request"):
        found.offer_to(REQUEST, "10.0.0.2")
    csr = new_request().certificate.decode()
    offer = found.offer_to(msgspec.structs.replace(REQUEST, csr=csr), "10.0.0.2")
    assert offer.authority == authority.certificate.decode().strip()
    assert x509.load_pem_x509_certificate(offer.certificate.encode())
    assert not offer.secret
