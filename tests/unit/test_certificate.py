# SPDX-License-Identifier: Apache-2.0
"""Certificates of a host's own: made once, kept for daemon and devices alone."""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from infiniswap.control import own_certificate as own_certificate_module
from infiniswap.control.own_certificate import (
    DEVICE,
    DONOR,
    certificate_path,
    keep_certificate,
    kept_certificate,
    new_certificate,
    own_certificate,
)
from infiniswap.control.tls import client_context, server_tls
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.secret import SECRET_BYTES_MAX


def test_it_is_made_at_the_first_start_and_found_at_the_next(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    first, note = own_certificate(state_dir, DONOR)
    again, _ = own_certificate(state_dir, DONOR)
    assert (first.digest, note) == (again.digest, "")
    key, public = state_dir / "donor.pem", certificate_path(state_dir, DONOR)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert "PRIVATE" not in public.read_text()
    assert {path.name for path in state_dir.iterdir()} == {"donor.pem", "donor.crt"}
    read = x509.load_pem_x509_certificate(public.read_bytes())
    assert isinstance(read.public_key(), ec.EllipticCurvePublicKey)
    assert read.public_key().curve.name == "secp256r1"  # type: ignore[union-attr]
    public.unlink()
    own_certificate(state_dir, DONOR)
    assert x509.load_pem_x509_certificate(public.read_bytes()) == read


@pytest.mark.parametrize("year", [2040, 2060])  # which DER writes in two ways
def test_one_made_under_a_wrong_clock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, year: int
) -> None:
    with monkeypatch.context() as wrong:
        wrong.setattr(own_certificate_module, "_EVER", datetime.datetime(year, 1, 2))
        first, _ = own_certificate_module.own_certificate(tmp_path, DONOR)
        kept = tmp_path / "metrics.pem"
        kept.write_bytes(new_certificate(DEVICE))
        kept.chmod(0o600)
    early = kept.read_bytes()
    again, note = own_certificate(tmp_path, DONOR)
    assert (again.digest != first.digest, note) == (True, "")
    assert f"it begins at {year}0102" in caplog.text
    public = x509.load_pem_x509_certificate(certificate_path(tmp_path, DONOR).read_bytes())
    assert public.not_valid_before_utc.year == 1970  # whatever the clock will say
    keep_certificate(tmp_path, DEVICE)
    assert kept.read_bytes() != early
    assert own_certificate(tmp_path, DONOR)[0].digest == again.digest


def test_somebody_elses_that_begins_later_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(own_certificate_module, "_EVER", datetime.datetime(2040, 1, 2))
        other.setattr(own_certificate_module, "_FOR_EVER", datetime.datetime(2041, 1, 2))
        first, _ = own_certificate(tmp_path, DONOR)
    assert own_certificate(tmp_path, DONOR)[0].digest == first.digest


def test_daemons_that_start_at_once_have_one_certificate(tmp_path: Path) -> None:
    digests: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: digests.append(own_certificate(tmp_path, DONOR)[0].digest))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 8
    assert set(digests) == {own_certificate(tmp_path, DONOR)[0].digest}


def test_where_it_cannot_be_kept_it_serves_one_start(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    found, note = own_certificate(blocked, DONOR)
    assert found.digest != own_certificate(blocked, DONOR)[0].digest
    assert "lasts until the next start" in note


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    own_certificate(tmp_path, DONOR)
    (tmp_path / "donor.pem").chmod(mode)
    with pytest.raises(ConfigError, match="other users"):
        own_certificate(tmp_path, DONOR)


@pytest.mark.parametrize("content", ["", "x", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "donor.pem"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        own_certificate(tmp_path, DONOR)
    assert caught.value.where == str(path)


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """Of two ends in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0]


def test_programs_can_check_it_by_its_one_name(tmp_path: Path) -> None:
    tls, _ = own_certificate(tmp_path, DONOR)
    checking = ssl.create_default_context(cafile=str(certificate_path(tmp_path, DONOR)))
    checking.verify_flags |= ssl.VERIFY_X509_STRICT
    assert _handshake(checking, tls.context, DONOR.name).version() == "TLSv1.3"
    other = server_tls(new_certificate())
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(checking, other.context, DONOR.name)


def _of_an_authority(key: rsa.RSAPrivateKey) -> bytes:
    """The certificate of that key in PEM form, and of who signed it."""
    authority = rsa.generate_private_key(65537, 2048)
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in ("donor", "authority")
    ]
    made = b""
    for subject, public in ((names[0], key.public_key()), (names[1], authority.public_key())):
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(names[1])
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        builder = builder.not_valid_after(datetime.datetime(2090, 1, 1, tzinfo=datetime.UTC))
        signed = builder.sign(authority, hashes.SHA256())
        made += signed.public_bytes(serialization.Encoding.PEM)
    return made


def _private(key: rsa.RSAPrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def test_one_of_an_administrators_own_authority_is_used(tmp_path: Path) -> None:
    """In place of the daemon's, with the certificate of who signed it after it."""
    own_certificate(tmp_path, DONOR)
    key = rsa.generate_private_key(65537, 4096)
    chain = _of_an_authority(key)
    path = tmp_path / "donor.pem"
    path.write_bytes(_private(key, serialization.NoEncryption()) + chain)
    assert path.stat().st_size > SECRET_BYTES_MAX
    tls, _ = own_certificate(tmp_path, DONOR)
    end = _handshake(client_context(), tls.context, "x")
    assert end.getpeercert(binary_form=True) == tls.certificate
    assert certificate_path(tmp_path, DONOR).read_bytes() == chain


def test_an_encrypted_key_is_one_clear_error(tmp_path: Path) -> None:
    """OpenSSL would ask the terminal."""
    key = rsa.generate_private_key(65537, 2048)
    path = tmp_path / "donor.pem"
    path.touch(0o600)
    encrypted = _private(key, serialization.BestAvailableEncryption(b"password"))
    path.write_bytes(encrypted + _of_an_authority(key))
    with pytest.raises(ConfigError, match="its key is encrypted"):
        own_certificate(tmp_path, DONOR)


def test_a_consumer_takes_any_and_sees_which(tmp_path: Path) -> None:
    tls = server_tls(new_certificate())
    end = _handshake(client_context(), tls.context, "x")
    assert end.getpeercert(binary_form=True) == tls.certificate
    assert not os.listdir(tmp_path)


def test_that_of_a_hosts_devices_is_another_one_with_another_name(tmp_path: Path) -> None:
    """Nobody who checks names takes a device for a donor."""
    donor, _ = own_certificate(tmp_path, DONOR)
    with pytest.raises(ConfigError, match="the metrics port has no certificate yet"):
        kept_certificate(tmp_path, DEVICE)  # what a device's process does: it makes none
    keep_certificate(tmp_path, DEVICE)
    device = kept_certificate(tmp_path, DEVICE)
    keep_certificate(tmp_path, DEVICE)
    assert kept_certificate(tmp_path, DEVICE).digest == device.digest != donor.digest
    key, public = tmp_path / "metrics.pem", certificate_path(tmp_path, DEVICE)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "PRIVATE" not in public.read_text()
    checking = ssl.create_default_context(cafile=str(public))
    assert _handshake(checking, device.context, DEVICE.name).version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(checking, device.context, DONOR.name)


def test_that_of_devices_is_kept_or_is_an_error(tmp_path: Path) -> None:
    """One for a single start would be worth nothing to those who check it."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(InfiniswapError, match="cannot keep the certificate of the metrics port"):
        keep_certificate(blocked, DEVICE)
    keep_certificate(tmp_path, DEVICE)
    (tmp_path / "metrics.pem").write_text("x")
    with pytest.raises(ConfigError, match="certificate of the metrics port cannot be used"):
        keep_certificate(tmp_path, DEVICE)
    assert (tmp_path / "metrics.pem").read_text() == "x"
