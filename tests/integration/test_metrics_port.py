# SPDX-License-Identifier: Apache-2.0
"""A device's metrics port, with real devices: TLS 1.3, one certificate, nobody else.

Who asks is Python's `ssl`, which trusts the certificate that docs/metrics.md gives to Prometheus.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support.devices.cluster import WAIT_S, Cluster, Device, unhurried, until
from support.donors.certificates import BOTH, CLUSTER, NOW, Authority, environment

from infiniswap.control.own_certificate import DEVICE, DONOR
from infiniswap.control.pki import load
from infiniswap.control.roles import Role, uri
from infiniswap.control.socket_owner import local_user
from infiniswap.donor.authority import period
from infiniswap.errors import ConfigError
from infiniswap.secret import CertificateFiles

pytestmark = pytest.mark.requires_native

TOKEN, OTHER_TOKEN = "the-first-token-of-all", "another-token-instead"


class World:
    """A donor, and a token in a file."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.token_file = cluster.root / "metrics-token"
        self.write_token(TOKEN)
        cluster.env["INFINISWAP_CLUSTER_METRICS_TOKEN_FILE"] = str(self.token_file)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        cluster.env["INFINISWAP_DEVICE_METRICS_LISTEN"] = f"127.0.0.1:{self.port}"

    def write_token(self, token: str) -> None:
        self.token_file.touch(0o600)
        self.token_file.write_text(token)

    def device(self, standby: str = "off") -> Device:
        self.cluster.env["INFINISWAP_DEVICE_STANDBY"] = standby
        return self.cluster.start("--frontend", "nbd-socket", size="16M")

    @property
    def key(self) -> Path:
        return self.cluster.backup_dir / "metrics.pem"

    @property
    def context(self) -> ssl.SSLContext:
        """Of a client that trusts this host's devices and nobody else."""
        return trusting(self.key.with_suffix(".crt"))

    def ask(
        self, context: ssl.SSLContext | None = None, token: str = TOKEN, name: str = DEVICE.name
    ) -> tuple[int, str]:
        """Status and body."""
        address = ("127.0.0.1", self.port)
        with (
            socket.create_connection(address, WAIT_S) as raw,
            (context or self.context).wrap_socket(raw, server_hostname=name) as secured,
        ):
            connection = http.client.HTTPConnection(name)
            connection.sock = secured
            connection.request(
                "GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {}
            )
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def serves(self, token: str = TOKEN) -> bool:
        """Whether the page is there, of a successor perhaps not yet."""
        try:
            return unhurried(lambda: self.ask(token=token))[0] == 200
        except ConnectionError:
            return False


def trusting(authority: Path) -> ssl.SSLContext:
    """A context of an ordinary client with this file of authorities."""
    context = ssl.create_default_context(cafile=str(authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


@pytest.fixture
def w(cluster: Cluster) -> World:
    made = World(cluster)
    cluster.donor()
    return made


def port_troubles(device: Device) -> list[str]:
    return [text for text in device.status["degraded"] if "metrics" in text]


def test_who_trusts_the_printed_certificate_and_has_the_token_reads_them(w: World) -> None:
    device = w.device()
    status, text = w.ask()
    assert status == 200
    assert f'device="{device.name}"' in text
    for wrong in ("", OTHER_TOKEN):
        status, text = w.ask(token=wrong)
        assert (status, "the metrics token is missing or wrong" in text) == (401, True)
    # Neither is a donor taken for it, nor it for a donor.
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        w.ask(name=DONOR.name)
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
        w.ask(trusting(w.cluster.donors[0].state_dir / "donor.crt"))
    old = w.context
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        w.ask(old)


def test_a_client_without_tls_is_told_so(w: World) -> None:
    device = w.device()
    connection = http.client.HTTPConnection("127.0.0.1", w.port, timeout=WAIT_S)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        assert answer.status == 400
        assert "this port speaks TLS 1.3: use https://" in answer.read().decode()
    finally:
        connection.close()
    me = local_user(os.getuid())
    assert f"refused a connection from 127.0.0.1 ({me}): it does not begin TLS" in device.log


@pytest.mark.requires_root
def test_the_certificate_stays_and_the_token_changes_by_a_reload(w: World) -> None:
    device = w.device(standby="on")
    context = w.context  # of a Prometheus that is told once
    device.wait_standby()  # it has read the first token
    w.write_token(OTHER_TOKEN)
    assert (w.ask(context)[0], w.ask(context, OTHER_TOKEN)[0]) == (200, 401)
    w.cluster.ok("device", "reload", device.name)  # returns when another standby knows it
    assert (w.ask(context)[0], w.ask(context, OTHER_TOKEN)[0]) == (401, 200)
    device.send(signal.SIGKILL)
    device.wait_take_over(1)
    until(lambda: w.serves(OTHER_TOKEN), "the successor's port")
    assert (w.ask(context)[0], w.ask(context, OTHER_TOKEN)[0]) == (401, 200)
    w.cluster.ok("device", "restart", device.name)
    until(lambda: w.serves(OTHER_TOKEN), "the port after a restart")
    assert w.ask(context, OTHER_TOKEN)[0] == 200
    device.stop()
    w.cluster.start("--frontend", "nbd-socket", name=device.name, size="")
    assert w.ask(context, OTHER_TOKEN)[0] == 200
    assert not port_troubles(device)


@pytest.mark.requires_root
def test_a_broken_file_ends_no_device_and_its_port_comes_back(w: World) -> None:
    device = w.device(standby="on")
    device.wait_standby()
    context, good = w.context, w.key.read_bytes()
    w.key.write_text("x")
    w.cluster.ok("device", "reload", device.name)
    (trouble,) = port_troubles(device)
    assert "keeps the former certificate and token" in trouble
    assert w.ask(context)[0] == 200
    refused = device.command("restart")
    assert refused.returncode == ConfigError.exit_code
    assert "the certificate of the metrics port cannot be used" in refused.stderr
    # The standby has the good one, its own successor only the broken one.
    device.send(signal.SIGKILL)
    device.wait_take_over(1)
    until(lambda: w.serves(), "the successor's port")
    device.wait_standby()
    device.send(signal.SIGKILL)
    device.wait_take_over(2)
    until(lambda: port_troubles(device), "word of the port")
    (trouble,) = port_troubles(device)
    assert "serves no metrics at its port" in trouble
    assert not w.serves()
    w.key.write_bytes(good)
    until(w.serves, "the port")
    assert w.ask(context)[0] == 200
    assert not port_troubles(device)


def test_a_device_without_a_standby_is_not_stopped_for_a_start_that_would_fail(w: World) -> None:
    device = w.device()
    w.key.write_text("x")
    for changes, words in (
        ({}, "the certificate of the metrics port cannot be used"),
        ({"INFINISWAP_CLUSTER_METRICS_TOKEN_FILE": ""}, "needs a metrics token"),
    ):
        refused = w.cluster.cli("device", "restart", device.name, **changes)
        assert refused.returncode == ConfigError.exit_code
        assert words in refused.stderr
        assert w.ask()[0] == 200


# ------------------------------------------------------------------------- certificates


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def host(authority: Authority) -> CertificateFiles:
    """Of the device's host."""
    return authority.files("h2", [Role.CONSUMER])


@pytest.fixture
def certified(cluster: Cluster, authority: Authority, host: CertificateFiles) -> World:
    """Certificates everywhere, and no token."""
    made = World(cluster)
    del cluster.env["INFINISWAP_CLUSTER_METRICS_TOKEN_FILE"]
    cluster.env |= environment(authority.files("h1", BOTH))
    cluster.donor()
    cluster.env |= environment(host)
    return made


def showing(files: CertificateFiles) -> ssl.SSLContext:
    """A context of an ordinary client that shows these."""
    context = trusting(files.ca)
    context.load_cert_chain(files.certificate, files.key)
    return context


def test_a_certificate_of_the_cluster_with_a_role_reads_them(
    certified: World, authority: Authority
) -> None:
    w = certified
    device = w.device()
    for role in (Role.CONSUMER, Role.OPERATOR):
        status, text = w.ask(showing(authority.files(f"reads-{role}", [role])), token="")
        assert (status, f'device="{device.name}"' in text) == (200, True)
    status, text = w.ask(showing(authority.files("lends", [Role.DONOR])), token="")
    assert (status, "takes the role consumer or operator" in text) == (403, True)
    red = authority.files("red", [Role.CONSUMER], cluster="red")
    status, text = w.ask(showing(red), token="")
    assert (status, "another cluster" in text) == (403, True)
    # No certificate, and one that somebody else has signed: TLS says so in an alert.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        w.ask(trusting(authority.files("none", []).ca))
    stranger = Authority(authority.directory / "other")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        w.ask(showing(stranger.files("h9", [Role.CONSUMER], accepts=authority)), token="")
    until(lambda: "it has shown no certificate" in device.log, "the first refusal in the log")
    with pytest.raises(ssl.SSLCertVerificationError):
        w.ask(trusting(stranger.files("h8", [Role.CONSUMER]).ca))
    # It needs none of its own then.
    assert not w.key.exists()


def shown_by(w: World, reader: CertificateFiles) -> bytes:
    """The certificate that the port shows, in DER form."""
    with (
        socket.create_connection(("127.0.0.1", w.port), WAIT_S) as raw,
        showing(reader).wrap_socket(raw, server_hostname=DEVICE.name) as secured,
    ):
        found = secured.getpeercert(binary_form=True)
    assert found is not None
    return found


def test_a_renewed_certificate_is_shown(
    certified: World, authority: Authority, host: CertificateFiles
) -> None:
    w = certified
    device, reader = w.device(), authority.files("reads", [Role.OPERATOR])
    before = shown_by(w, reader)
    authority.renew(host, "h2", [Role.CONSUMER])
    w.cluster.ok("device", "reload", device.name)
    by_reload = shown_by(w, reader)
    assert by_reload != before
    authority.renew(host, "h2", [Role.CONSUMER])
    until(
        lambda: unhurried(lambda: shown_by(w, reader)) not in (before, by_reload), "the second one"
    )
    assert not port_troubles(device)
    assert not re.search("no metrics", device.log)


def test_a_certificate_for_clients_alone_is_refused_where_a_port_shows_it(
    authority: Authority, host: CertificateFiles
) -> None:
    _sign_for_clients(authority, host)
    load(host, CLUSTER, Role.CONSUMER)
    with pytest.raises(ConfigError, match="unsuitable certificate purpose"):
        load(host, CLUSTER, Role.CONSUMER, serves=True)


def _sign_for_clients(authority: Authority, files: CertificateFiles) -> None:
    """As an authority of somebody's own might."""
    signer = x509.load_pem_x509_certificate(authority.pair.certificate)
    signer_key = serialization.load_pem_private_key(authority.pair.key, password=None)
    assert isinstance(signer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    when = period(30, NOW)
    name = x509.UniformResourceIdentifier(uri(CLUSTER, Role.CONSUMER, "h2"))
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "h2")]))
        .issuer_name(signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(when.since)
        .not_valid_after(when.until)
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(signer_key, hashes.SHA256())
    )
    files.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
