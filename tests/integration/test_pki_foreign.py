# SPDX-License-Identifier: Apache-2.0
"""Certificates as other authorities make them, by design or by mistake, and hostile ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support.donors.certificates import CLUSTER, DAY, NOW, Authority, client_with
from support.donors.certified_world import donor, reload
from support.donors.donor_world import IDENTITY, Handler

from infiniswap.control import messages as m
from infiniswap.control.client import connect, fetch_status
from infiniswap.control.pki import load
from infiniswap.control.roles import Role
from infiniswap.errors import InfiniswapError, WrongCertificateError
from infiniswap.secret import CertificateFiles

HOST = f"infiniswap://{CLUSTER}/consumer/host1"


class Signed:
    """A certificate with its key, by whoever is named; `None` signs itself."""

    def __init__(
        self,
        by: Signed | None,
        *uris: str,
        name: str = "host1",
        is_ca: bool | None = False,
        uses: tuple[x509.ObjectIdentifier, ...] = (),
    ) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = by or self
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(signer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - DAY)
            .not_valid_after(NOW + 30 * DAY)
        )
        if uris:
            names = [x509.UniformResourceIdentifier(uri) for uri in uris]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if is_ca is not None:
            limits = x509.BasicConstraints(ca=is_ca, path_length=None)
            builder = builder.add_extension(limits, critical=True)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        self.pem = builder.sign(signer.key, hashes.SHA256()).public_bytes(
            serialization.Encoding.PEM
        )

    def files(self, directory: Path, ca: bytes, *between: Signed) -> CertificateFiles:
        directory.mkdir(parents=True, exist_ok=True)
        names = ("ca.pem", "certificate.pem", "key.pem")
        files = CertificateFiles(*(directory / name for name in names))
        files.ca.write_bytes(ca)
        files.certificate.write_bytes(self.pem + b"".join(each.pem for each in between))
        files.key.touch(0o600)
        files.key.write_bytes(
            self.key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


@pytest.fixture
def root() -> Signed:
    return Signed(None, name="root", is_ca=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def test_an_authority_between_is_believed_and_goes_with_its_root(
    authority: Authority, root: Signed, tmp_path: Path
) -> None:
    """Certificates of a company's authority have one or two between."""
    between = Signed(root, name="between", is_ca=True)
    both = authority.pair.certificate + root.pem
    config = client_with(Signed(between, HOST).files(tmp_path / "host1", both, between))
    files = authority.files("donor1", [Role.DONOR])
    files.ca.write_bytes(both)
    async with donor(authority, files=files) as w:
        async with await connect(w.address, IDENTITY, config, Handler()) as session:
            await reload(w)
            await session.memory()
            files.ca.write_bytes(authority.pair.certificate)
            await reload(w)
            assert (await session.wait_ended()).reason == m.GOODBYE_CERTIFICATE
        with pytest.raises(WrongCertificateError):
            await fetch_status(w.address, config)


@pytest.mark.parametrize("is_ca", [False, None])
async def test_a_host_cannot_sign_for_another_one(
    authority: Authority, root: Signed, tmp_path: Path, is_ca: bool | None
) -> None:
    host = Signed(root, HOST, name="host2", is_ca=is_ca)
    forged = Signed(host, f"infiniswap://{CLUSTER}/operator/host1")
    await refused(authority, root, forged, tmp_path, host)


async def refused(
    authority: Authority, root: Signed, signed: Signed, place: Path, *between: Signed
) -> None:
    """The host itself refuses it; so does a donor that is shown it nevertheless."""
    both = authority.pair.certificate + root.pem
    files = signed.files(place / "shown", both, *between)
    with pytest.raises(InfiniswapError):
        load(files, CLUSTER, Role.CONSUMER)
    trusting = authority.files("donor1", [Role.DONOR])
    trusting.ca.write_bytes(both)
    good = Signed(root, HOST).files(place / "good", both)
    config = client_with(good)
    assert config.credentials is not None
    shown = files.certificate.read_bytes() + files.key.read_bytes()
    config.credentials.client.load_cert_chain(_written(place / "shown.pem", shown))
    async with donor(authority, files=trusting) as w:
        with pytest.raises(WrongCertificateError):
            await connect(w.address, IDENTITY, config, Handler())
        assert not w.donor.server.sessions
        assert w.donor.server.counters["certificates_refused"] >= 1


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


URIS = {
    "none": (),
    "upper case": (f"INFINISWAP://{CLUSTER}/consumer/host1",),
    "the role in upper case": (f"infiniswap://{CLUSTER}/CONSUMER/host1",),
    "another case of the cluster": ("infiniswap://Default/consumer/host1",),
    "two hosts": (HOST, f"infiniswap://{CLUSTER}/consumer/host2"),
    "a slash in the host": (f"{HOST}/host2",),
    "a slash at the end": (f"{HOST}/",),
    "no host": (f"infiniswap://{CLUSTER}/consumer/",),
    "percent": (f"infiniswap://{CLUSTER}/consumer/host%31",),
    "a line break": (f"{HOST}\n",),
    "a zero": (f"{HOST}\0",),
    "a zero before another host": (f"{HOST}\0.example",),
    "a user": (f"infiniswap://{CLUSTER}@other/consumer/host1",),
    "a port": (f"infiniswap://{CLUSTER}:1/consumer/host1",),
    "a query": (f"{HOST}?role=operator",),
    "a host of every name": (f"infiniswap://{CLUSTER}/consumer/*",),
    "one that is none besides": (HOST, "infiniswap://x"),
    "the role of a donor": (f"infiniswap://{CLUSTER}/donor/host1",),
    "an unknown role": (f"infiniswap://{CLUSTER}/admin/host1",),
    "another cluster's consumer, and a donor here": (
        "infiniswap://other/consumer/host1",
        f"infiniswap://{CLUSTER}/donor/host1",
    ),
}


@pytest.mark.parametrize("name", URIS)
async def test_names_that_are_not_exactly_those_of_a_consumer_are_refused(
    authority: Authority, root: Signed, tmp_path: Path, name: str
) -> None:
    await refused(authority, root, Signed(root, *URIS[name]), tmp_path)


async def test_a_certificate_for_servers_alone_borrows_nothing(
    authority: Authority, root: Signed, tmp_path: Path
) -> None:
    signed = Signed(root, HOST, uses=(ExtendedKeyUsageOID.SERVER_AUTH,))
    await refused(authority, root, signed, tmp_path)
