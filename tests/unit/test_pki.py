# SPDX-License-Identifier: Apache-2.0
"""The files of a host's certificate: what is said of broken ones, and of those that end soon."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.configs import configured
from support.donors.certificates import (
    BOTH,
    CLUSTER,
    DAY,
    NOW,
    Authority,
    settings,
)

from infiniswap.cli.doctor import donors as doctor
from infiniswap.control import pem
from infiniswap.control.pki import CertificateWatch, check_date, load
from infiniswap.control.roles import Role, uris_in
from infiniswap.device.process.shown import Shown
from infiniswap.donor.authority import Period
from infiniswap.errors import ConfigError
from infiniswap.secret import CertificateFiles, new_secret, read_certificates, write_secret

DAY_S = DAY.total_seconds()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def files(authority: Authority) -> CertificateFiles:
    return authority.files("h1", BOTH)


# ------------------------------------------------------------------------ broken files


def cut(path: Path, bytes_max: int) -> None:
    path.write_bytes(path.read_bytes()[:bytes_max])


def alter(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))


BROKEN: dict[str, tuple[Callable[[CertificateFiles], object], str, str]] = {
    "half a certificate": (lambda f: cut(f.certificate, 300), "certificate", "it is cut short"),
    "half of a second certificate": (
        lambda f: f.certificate.write_bytes(f.certificate.read_bytes() + f.ca.read_bytes()[:99]),
        "certificate",
        "it is cut short",
    ),
    "text": (lambda f: f.certificate.write_text("hello"), "certificate", "no certificate in PEM"),
    "DER": (
        lambda f: f.certificate.write_bytes(ssl.PEM_cert_to_DER_cert(f.certificate.read_text())),
        "certificate",
        "no certificate in PEM",
    ),
    "a damaged certificate": (
        lambda f: alter(f.certificate, b"MII", b"AAA"),
        "certificate",
        "is damaged",
    ),
    "half a key": (lambda f: cut(f.key, 100), "key", "it is cut short"),
    "no key": (lambda f: f.key.write_text("hello"), "key", "no private key in PEM"),
    "a damaged key": (lambda f: alter(f.key, b"MIG", b"AAA"), "certificate", "is damaged"),
    "the certificate as key": (
        lambda f: f.key.write_bytes(f.certificate.read_bytes()),
        "key",
        "no private key in PEM",
    ),
    "half an authority": (lambda f: cut(f.ca, 300), "ca", "it is cut short"),
    "half of a second authority": (
        lambda f: f.ca.write_bytes(f.ca.read_bytes() + f.ca.read_bytes()[:300]),
        "ca",
        "it is cut short",
    ),
    "no authority": (lambda f: f.ca.write_text("hello"), "ca", "no certificate in PEM"),
    "the host's certificate as authority": (
        lambda f: f.ca.write_bytes(f.certificate.read_bytes()),
        "ca",
        "no certificate in it is one of an authority",
    ),
}


@pytest.mark.parametrize("role", [Role.DONOR, None])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_a_remedy(
    files: CertificateFiles, name: str, role: Role | None
) -> None:
    make, which, words = BROKEN[name]
    make(files)
    with pytest.raises(ConfigError, match=words) as caught:
        load(files, CLUSTER, role)
    assert caught.value.where == str(getattr(files, which))
    assert caught.value.mend.startswith("Copy ")
    assert not any(raw in str(caught.value) for raw in ("_ssl.c", "PEM lib", "[SSL", "codec"))


def test_another_hosts_key_is_said_to_be_one(files: CertificateFiles, authority: Authority) -> None:
    files.key.write_bytes(authority.files("h2", BOTH).key.read_bytes())
    with pytest.raises(ConfigError, match="do not belong together") as caught:
        load(files, CLUSTER)
    assert "KEY_VALUES" not in str(caught.value)


def test_text_around_the_certificates_of_authorities_may_be_in_any_language(
    files: CertificateFiles,
) -> None:
    files.ca.write_bytes("# Zürich\n".encode() + files.ca.read_bytes())
    load(files, CLUSTER)


# -------------------------------------------------------------------- what ends, and when


def of_an_authority(directory: Path, days: float) -> CertificateFiles:
    """Of a host, with a certificate that is good for long, of an authority that is good for so many
    days."""
    return Authority(directory, when=Period(NOW - 400 * DAY, NOW + days * DAY)).files(
        "h1", BOTH, Period(NOW - 3 * DAY, NOW + days * DAY)
    )


def sentences(files: CertificateFiles, now_s: float = 0.0) -> list[str]:
    clock = (lambda: now_s) if now_s else time.time
    return CertificateWatch(files, CLUSTER, Role.DONOR, clock).sentences()


def test_the_end_of_the_authority_is_told_two_months_before(tmp_path: Path) -> None:
    assert not sentences(of_an_authority(tmp_path / "later", 61))
    (sentence,) = sentences(of_an_authority(tmp_path / "soon", 59))
    assert "the certificate of the authority (Infiniswap cluster default) expires in" in sentence


def test_the_end_of_an_authority_that_is_trusted_besides_is_told_as_well(
    files: CertificateFiles, tmp_path: Path
) -> None:
    other = of_an_authority(tmp_path / "other", 20)
    files.ca.write_bytes(files.ca.read_bytes() + other.ca.read_bytes())
    (sentence,) = sentences(files)
    assert "the certificate of the authority" in sentence
    # It does not matter to those that show a certificate of the first one.
    after_s = (NOW + 21 * DAY).timestamp()
    assert load(files, CLUSTER).problem(after_s) is None


def test_nothing_starts_with_an_authority_that_does_not_count(tmp_path: Path) -> None:
    later = Authority(tmp_path / "later", when=Period(NOW + DAY, NOW + 400 * DAY))
    with pytest.raises(ConfigError, match=r"of the authority .* is not valid before"):
        check_date(load(later.files("h1", BOTH), CLUSTER))


def test_doctor_tells_of_the_authority(tmp_path: Path) -> None:
    found = of_an_authority(tmp_path / "soon", 30)
    config = configured(daemon__listen="127.0.0.1:0", **settings(found))
    findings = list(doctor.secret(config))
    assert [finding.state for finding in findings] == ["degraded"]
    assert "the certificate of the authority" in findings[0].what
    assert "Make another authority" in findings[0].mend


def test_each_kind_of_warning_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = of_an_authority(tmp_path / "soon", 30)
    clock = [NOW.timestamp()]
    watch = CertificateWatch(found, CLUSTER, Role.DONOR, lambda: clock[0])
    for _ in range(3):
        watch.look()
        clock[0] += 60
    assert caplog.text.count("certificate of the authority") == 1
    clock[0] += 25 * DAY_S
    watch.look()
    assert caplog.text.count("certificate of this host") == 1
    assert caplog.text.count("certificate of the authority") == 1


# ------------------------------------------------------------------ what went before


def test_what_was_shown_before_is_shown_while_files_are_broken(
    files: CertificateFiles, authority: Authority
) -> None:
    former = read_certificates(files)
    files.certificate.unlink()
    with pytest.raises(ConfigError):
        CertificateWatch(files, CLUSTER, Role.CONSUMER)
    watch = CertificateWatch(files, CLUSTER, Role.CONSUMER, former=former)
    assert watch.now.texts == former
    assert "the former certificate is still shown" in watch.sentences()[0]
    assert not watch.look()
    authority.renew(files, "h1", BOTH)
    assert not watch.look()  # perhaps the key is still to come
    assert watch.look()
    assert not watch.sentences()


def test_good_files_count_more_than_what_was_shown_before(
    files: CertificateFiles, authority: Authority
) -> None:
    former = read_certificates(files)
    authority.renew(files, "h1", BOTH)
    watch = CertificateWatch(files, CLUSTER, Role.CONSUMER, former=former)
    assert watch.now.texts == read_certificates(files) != former


@pytest.mark.parametrize("kept", [b"", b"{}", b"\xff", b'{"first": 1, "second": 2, "texts": 3}'])
def test_a_predecessor_that_kept_nothing_of_use_is_as_good_as_none(
    files: CertificateFiles, kept: bytes
) -> None:
    config = configured(**settings(files))
    Shown(config, 1.0, is_start=False, kept=kept)
    files.key.unlink()
    with pytest.raises(ConfigError):
        Shown(config, 1.0, is_start=False, kept=kept)


def test_what_is_kept_of_secrets_is_used_where_their_files_are_broken(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        write_secret(path, new_secret())
    config = configured(cluster__secret_file=first, cluster__second_secret_file=second)
    before = Shown(config, 1.0, is_start=True)
    second.unlink()
    after = Shown(config, 1.0, is_start=False, kept=before.kept())
    assert after.client.keys == before.client.keys
    assert after.kept() == before.kept()
    assert "the device uses what it had before" in after.degraded()[0]


def test_names_of_a_refused_certificate_are_as_long_as_they_are(tmp_path: Path) -> None:
    """A byte of what follows in the certificate is a digit: 0x30, SEQUENCE."""
    for host in ("h2", "h" * 60):
        files = Authority(tmp_path / host).files(host, [Role.OPERATOR])
        (shown,) = map(pem.der, pem.certificates(files.certificate.read_bytes()))
        assert uris_in(shown) == (f"infiniswap://default/operator/{host}",)
