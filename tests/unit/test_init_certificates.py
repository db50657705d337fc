# SPDX-License-Identifier: Apache-2.0
"""`infiniswap init --authority` and `--certificate`: what they write is what hosts accept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from infiniswap import config as configuration
from infiniswap.cli.main import main
from infiniswap.control.pki import load
from infiniswap.control.roles import Role
from infiniswap.donor.authority import new_authority, period
from infiniswap.errors import ConfigError
from infiniswap.secret import CertificateFiles

DAY_S = 86400


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "DEFAULT_PATH", tmp_path / "none.toml")


def said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Exit code, and everything that was printed."""
    code = main(["init", *options])
    out = capsys.readouterr()
    return f"{code} {out.out}{out.err}"


def host(capsys: pytest.CaptureFixture[str], root: Path, *roles: str, days: int = 30) -> str:
    """Has a certificate made for the host h1."""
    options = [option for role in roles for option in ("--role", role)]
    return said(
        capsys,
        *("--authority", str(root / "ca"), "--certificate", str(root / "h1"), "--host", "h1"),
        *("--days", str(days), *options),
    )


def files(root: Path) -> CertificateFiles:
    place = root / "h1"
    return CertificateFiles(place / "ca.pem", place / "certificate.pem", place / "key.pem")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_host_gets_a_certificate_that_its_cluster_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINISWAP_CLUSTER_NAME", "blue")
    assert said(capsys, "--authority", str(tmp_path / "ca")).startswith("0 ")
    assert host(capsys, tmp_path, "donor", "consumer").startswith("0 ")
    found = load(files(tmp_path), "blue", Role.DONOR)
    assert found.subject.host == "h1"
    assert found.subject.roles == {Role.DONOR, Role.CONSUMER}
    assert (mode(files(tmp_path).key), mode(files(tmp_path).certificate)) == (0o600, 0o644)
    assert mode(tmp_path / "ca" / "ca-key.pem") == 0o600
    with pytest.raises(ConfigError, match="another cluster"):
        load(files(tmp_path), "red")
    # Once more: renewed in place, with another key, and nothing else in the directory.
    key = files(tmp_path).key.read_bytes()
    assert host(capsys, tmp_path, "consumer", days=90).startswith("0 ")
    renewed = load(files(tmp_path), "blue")
    assert renewed.subject.roles == {Role.CONSUMER}
    assert abs(renewed.until_s - found.until_s - 60 * DAY_S) < DAY_S
    assert files(tmp_path).key.read_bytes() != key
    assert len(list((tmp_path / "h1").iterdir())) == 3


def test_an_authority_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = tmp_path / "ca"
    assert said(capsys, "--authority", str(authority)).startswith("0 ")
    before = {path: path.read_bytes() for path in authority.iterdir()}
    assert "there is an authority already" in said(capsys, "--authority", str(authority))
    (authority / "ca-key.pem").unlink()
    assert "there is an authority already" in said(capsys, "--authority", str(authority))
    assert not (authority / "ca-key.pem").exists()
    assert (authority / "ca.pem").read_bytes() == before[authority / "ca.pem"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "h1"], "need --authority DIR"),
        (["--certificate", "{}/h1"], "need --authority DIR"),
        (["--authority", "{}/ca", "--role", "donor"], "need --certificate DIR"),
        (["--authority", "{}/ca", "--certificate", "{}/h1", "--host", "h1"], "at least one --role"),
        (["--authority", "{}/ca", "--certificate", "{}/h1", "--role", "donor"], "--host NAME"),
        (["--authority", "{}/ca", "--secret", "{}/s"], "two commands"),
    ],
)
def test_options_that_do_not_belong_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in said(capsys, *(option.format(tmp_path) for option in options))
    assert not list(tmp_path.iterdir())


def test_what_cannot_sign_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"infiniswap init --authority {tmp_path / 'ca'}" in host(capsys, tmp_path, "donor")
    assert said(capsys, "--authority", str(tmp_path / "ca")).startswith("0 ")
    assert "--days must be" in host(capsys, tmp_path, "donor", days=0)
    assert "--days must be" in host(capsys, tmp_path, "donor", days=900)
    options = ("--authority", str(tmp_path / "ca"), "--certificate", str(tmp_path / "h1"))
    wrong = said(capsys, *options, "--host", "a host", "--role", "donor")
    assert "only up to 64 letters" in wrong
    assert said(capsys, "--authority", str(tmp_path / "other")).startswith("0 ")
    (tmp_path / "ca" / "ca-key.pem").write_bytes((tmp_path / "other" / "ca-key.pem").read_bytes())
    assert "do not belong together" in host(capsys, tmp_path, "donor")
    (tmp_path / "ca" / "ca-key.pem").write_bytes(b"none\n")
    assert "no certificate was made" in host(capsys, tmp_path, "donor")
    assert not (tmp_path / "h1").exists()


def test_no_certificate_outlives_its_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would stop counting before its own end, and nobody would have said so."""
    ca = tmp_path / "ca"
    made = new_authority("default", period(20))
    ca.mkdir()
    (ca / "ca.pem").write_bytes(made.certificate)
    (ca / "ca-key.pem").write_bytes(made.key)
    assert "the authority itself is good until" in host(capsys, tmp_path, "donor")
    assert host(capsys, tmp_path, "donor", days=19).startswith("0 ")
