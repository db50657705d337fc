# SPDX-License-Identifier: Apache-2.0
"""A donor's own certificate: made at the first start, kept beside its state.

    STATE_DIR/donor.pem    key and certificate, for this user alone
              donor.crt    the certificate alone, for programs that check it (Prometheus)

Consumers check no name and no date in it: they trust the proof of the cluster secret, which covers
the certificate's digest. So several daemons on one host may share one, and where it cannot be kept
a certificate for one start serves as well.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import tempfile
from pathlib import Path
from typing import Final

from infiniswap.control import pem
from infiniswap.control.text import clean_text
from infiniswap.control.tls import ServerTls, server_tls
from infiniswap.errors import ConfigError
from infiniswap.secret import read_tls_key, write_new

SERVER_NAME: Final = "infiniswap-donor"
"""In every donor's certificate. Addresses change, so programs that check a name check this one."""

_FOR_EVER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""RFC 5280, 4.1.2.5: no well-defined expiration date."""


def certificate_path(state_dir: Path) -> Path:
    """Where the certificate alone lies."""
    return state_dir / "donor.crt"


def donor_certificate(state_dir: Path) -> tuple[ServerTls, str]:
    """The donor's certificate, made where there is none. Blocking.

    Returns:
        The certificate; why it is not kept, as a sentence, empty: it is.

    Raises:
        ConfigError: the file there cannot be used, or others may have read the key.
    """
    path = state_dir / "donor.pem"
    note = ""
    if not os.path.exists(path):
        made = new_certificate()
        try:
            _keep(path, made)
        except OSError as error:
            note = (
                f"the certificate of the control port lasts until the next start: {state_dir} "
                f"cannot be written ({error.strerror})"
            )
            return _used(made, path), note
    found = _used(read_tls_key(path), path)
    with contextlib.suppress(OSError):
        _write_certificate(state_dir, path.read_bytes())
    return found, note


def _used(content: bytes, path: Path) -> ServerTls:
    try:
        return server_tls(content)
    except ValueError as error:
        raise ConfigError(
            f"the certificate of the control port cannot be used ({error})",
            where=str(path),
            mend="Remove the file: the daemon makes a new one.",
        ) from None


def _keep(path: Path, content: bytes) -> None:
    """Two daemons may start at once: the first one's file is there to stay."""
    with contextlib.suppress(FileExistsError):
        write_new(path, content)
        _write_certificate(path.parent, content)


def _write_certificate(state_dir: Path, content: bytes) -> None:
    """Those in the text, unless they are there: somebody may have put another key in place."""
    text = b"\n".join(pem.certificates(content)) + b"\n"
    with contextlib.suppress(OSError):
        if certificate_path(state_dir).read_bytes() == text:
            return
    descriptor, temporary = tempfile.mkstemp(dir=state_dir, prefix=".donor.crt.")
    with open(descriptor, "wb") as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
    os.replace(temporary, certificate_path(state_dir))


def new_certificate() -> bytes:
    """A key and a certificate for it, in PEM form."""
    # Here, as a daemon that finds its certificate needs none of it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    host = clean_text(socket.gethostname(), 64) or SERVER_NAME
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    # A day ago: the clocks of two hosts differ.
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    usage = dict.fromkeys(
        (
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
        ),
        False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(_FOR_EVER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
