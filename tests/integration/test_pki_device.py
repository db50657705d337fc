# SPDX-License-Identifier: Apache-2.0
"""Certificates in place of the secret, with daemons, a device and commands as real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, Device, until
from support.devices.copied import Copied
from support.donors.certificates import BOTH, EXPIRED, Authority, environment

from infiniswap.control.roles import Role
from infiniswap.secret import CertificateFiles
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 16 * MIB


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def consumer(authority: Authority) -> CertificateFiles:
    return authority.files("h2", [Role.CONSUMER])


@pytest.fixture
def certified(cluster: Cluster, authority: Authority, consumer: CertificateFiles) -> Cluster:
    """A donor with the role, and everything that is started later with a consumer's certificate."""
    cluster.env |= environment(authority.files("h1", BOTH))
    cluster.donor()
    cluster.env |= environment(consumer)
    return cluster


def troubles(device: Device) -> list[str]:
    """What its status says of certificates."""
    return [text for text in device.status["degraded"] if "certificate" in text]


def test_pages_travel_and_a_successor_takes_over(
    certified: Cluster, tmp_path: Path, authority: Authority
) -> None:
    cluster = certified
    device = cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    data = Copied(device, tmp_path)
    data.fill(SIZE)
    assert data.read_back()["pages_in_remote"] > 0
    row = cluster.donor_row(cluster.donors[0])
    assert row["state"] == "serving", row
    # A consumer may not drain; an operator may.
    address = cluster.addresses
    refused = cluster.cli("donor", "drain", address)
    assert refused.returncode != 0
    assert "takes the role operator" in refused.stderr
    cluster.ok("donor", "undrain", address, **environment(authority.files("h3", [Role.OPERATOR])))
    cluster.ok("device", "restart", device.name)
    data.read_back()
    data.fill(SIZE)
    assert data.read_back()["pages_in_remote"] > 0


def test_a_start_is_refused_with_what_is_wrong(certified: Cluster, authority: Authority) -> None:
    cluster = certified
    for files, words in (
        (authority.files("old", [Role.CONSUMER], EXPIRED), "has expired"),
        (authority.files("h4", [Role.DONOR]), "role consumer"),
        (authority.files("h5", [Role.CONSUMER], cluster="red"), "another cluster"),
    ):
        done = cluster.cli(
            *("device", "start", cluster.name(), "--donors", cluster.addresses),
            *("--frontend", "nbd-socket", "--size", str(SIZE)),
            **environment(files),
        )
        assert done.returncode != 0
        assert words in done.stderr, done.stderr
    assert not cluster.names()


def test_a_device_goes_on_while_its_certificate_is_out_of_date(
    certified: Cluster, tmp_path: Path, authority: Authority, consumer: CertificateFiles
) -> None:
    cluster = certified
    device = cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    data = Copied(device, tmp_path)
    data.fill(SIZE)
    authority.renew(consumer, "h2", [Role.CONSUMER], EXPIRED)
    until(lambda: troubles(device), "word of the certificate")
    refused = cluster.cli("device", "restart", device.name)
    assert refused.returncode != 0
    assert "has expired" in refused.stderr
    data.fill(SIZE)
    assert data.read_back()["pages_in_remote"] > 0
    authority.renew(consumer, "h2", [Role.CONSUMER])
    until(lambda: not troubles(device), "the renewed certificate in use")
    cluster.ok("device", "restart", device.name)
    data.read_back()
    data.fill(SIZE)
    assert data.read_back()["pages_in_remote"] > 0


# --------------------------------------------------------------- files that are broken


BROKEN: dict[str, Callable[[CertificateFiles], object]] = {
    "half a certificate": lambda f: f.certificate.write_bytes(f.certificate.read_bytes()[:300]),
    "no key": lambda f: f.key.unlink(),
    "an empty authority": lambda f: f.ca.write_bytes(b""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_standby_that_finds_certificates_broken_shows_what_its_predecessor_did(
    certified: Cluster,
    tmp_path: Path,
    authority: Authority,
    consumer: CertificateFiles,
    name: str,
) -> None:
    certified.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    device = certified.start("--frontend", "nbd-socket", size=str(SIZE))
    data = Copied(device, tmp_path)
    data.fill(SIZE)
    BROKEN[name](consumer)
    device.wait_take_over_by_another_standby()
    data.read_back()
    data.fill(SIZE)
    assert data.read_back()["pages_in_remote"] > 0
    (sentence,) = troubles(device)
    assert "the former certificate is still shown" in sentence
    assert sentence in certified.ok("device", "reload", device.name)
    authority.files("h2", [Role.CONSUMER])
    until(lambda: not troubles(device), "the renewed certificate in use")


def of_two(first: Authority, second: Authority) -> tuple[CertificateFiles, CertificateFiles, bytes]:
    """Files of a donor and of a consumer, each of an authority; both trust both, whose certificates
    come last."""
    both = first.pair.certificate + second.pair.certificate
    donor, consumer = first.files("h1", BOTH), second.files("h2", [Role.CONSUMER])
    for files in (donor, consumer):
        files.ca.write_bytes(both)
    return donor, consumer, both


def test_a_device_leaves_a_donor_whose_authority_was_removed(
    cluster: Cluster, tmp_path: Path, authority: Authority
) -> None:
    """Its pages there are read on, until the donor takes them back."""
    other = Authority(tmp_path / "other")
    donor, consumer, both = of_two(authority, other)
    cluster.env |= environment(donor)
    cluster.donor()
    cluster.env |= environment(consumer)
    device = cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    data = Copied(device, tmp_path)
    data.fill(SIZE)
    consumer.ca.write_bytes(other.pair.certificate)
    cluster.ok("device", "reload", device.name)
    until(
        lambda: "was not signed by the authority" in device.status["donors"][0]["detail"],
        "the donor to be refused",
    )
    assert data.read_back()["pages_in_remote"] > 0
    consumer.ca.write_bytes(both)
    cluster.ok("device", "reload", device.name)
    until(lambda: not device.status["donors"][0]["detail"], "the donor to be back")
    data.read_back()


def test_a_device_without_a_backup_keeps_its_pages_when_an_authority_is_replaced(
    cluster: Cluster, tmp_path: Path, authority: Authority
) -> None:
    """Its session began with a certificate of the authority that the donor then removes."""
    of_donor, consumer, _ = of_two(authority, Authority(tmp_path / "old"))
    cluster.env |= environment(of_donor)
    donor = cluster.donor()
    cluster.env |= environment(consumer)
    device = cluster.start(
        *("--frontend", "nbd-socket", "--backup", "none", "--allow-data-loss"), size=str(SIZE)
    )
    data = Copied(device, tmp_path)
    data.fill(SIZE)
    authority.renew(consumer, "h2", [Role.CONSUMER])
    cluster.ok("device", "reload", device.name)
    assert device.status["donors"][0]["reclaimed"] == 0
    of_donor.ca.write_bytes(authority.pair.certificate)
    donor.send(signal.SIGHUP)
    until(lambda: device.status["donors"][0]["reclaimed"] == 1, "the device to be back")
    assert "no longer trusts the authority" in donor.log
    data.read_back()
    assert device.status["stats"]["requests_failed"] == 0
