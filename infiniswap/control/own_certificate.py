# SPDX-License-Identifier: Apache-2.0
"""A host's own certificates, where a secret takes the place of an authority: made once, kept beside
the state of those who show them.

    DIRECTORY/donor.pem    of the daemon: key and certificate, for its user alone
              donor.crt    the certificate alone, for programs that check it (Prometheus)
              metrics.pem  of the metrics ports of this host's devices
              metrics.crt

Consumers check no name and no date in a daemon's certificate: they trust the proof of the cluster
secret, which covers the certificate's digest. So several daemons on one host may share one, and
where it cannot be kept a certificate for one start serves as well. A device's certificate has to be
kept, because whoever reads the metrics knows the device by that alone.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.control import pem
from infiniswap.control.host_name import host_name
from infiniswap.control.tls import ServerTls, server_tls
from infiniswap.directories import make_directory
from infiniswap.errors import ConfigError, from_oserror
from infiniswap.secret import read_tls_key, write_new

_EVER: Final = datetime.datetime(1970, 1, 1)
"""Since when they count: the clock may be wrong when one is made."""
_FOR_EVER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""RFC 5280, 4.1.2.5: no well-defined expiration date."""


_VALIDITY: Final = re.compile(
    rb"(?:\x17\x0d(\d\d)(\d{10})Z|\x18\x0f(\d{14})Z)\x18\x0f99991231235959Z", re.ASCII
)
"""Since when one of ours counts, in DER (RFC 5280, 4.1.2.5: years from 1950 to 2049 have two
digits). The library that reads certificates takes longer to import than the rest of a start."""
_DATE: Final = "%Y%m%d%H%M%S"
_CLOCK_MIN: Final = "20250101"
"""A clock that says less is wrong itself."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shower:
    """Who shows a certificate of their own.

    Attributes:
        stem: of the files.
        name: in every certificate of theirs. Addresses change, so programs that check a name check
            this one.
        port: where it is shown.
        key: of the configuration, that names the directory.
        maker: makes another one when the file is gone.
    """

    stem: str
    name: str
    port: str
    key: str
    maker: str


DONOR: Final = Shower(
    "donor", "infiniswap-donor", "control port", "daemon.state_dir", "the daemon makes"
)
DEVICE: Final = Shower(
    "metrics",
    "infiniswap-device",
    "metrics port",
    "device.backup_dir",
    "`infiniswap device start` and `infiniswap device restart` make",
)


def certificate_path(directory: Path, shower: Shower) -> Path:
    """Where the certificate alone lies."""
    return directory / f"{shower.stem}.crt"


def key_path(directory: Path, shower: Shower) -> Path:
    """Where key and certificate lie."""
    return directory / f"{shower.stem}.pem"


def own_certificate(directory: Path, shower: Shower) -> tuple[ServerTls, str]:
    """The certificate, made where there is none. Blocking.

    Returns:
        The certificate; why it is not kept, as a sentence, empty: it is.

    Raises:
        ConfigError: the file there cannot be used, or others may have read the key.
    """
    path = key_path(directory, shower)
    note = ""
    _remove_early(path, shower)
    if not os.path.exists(path):
        made = new_certificate(shower)
        try:
            _keep(path, made)
        except OSError as error:
            note = (
                f"the certificate of the {shower.port} lasts until the next start: {directory} "
                f"cannot be written ({error.strerror})"
            )
            return _used(made, path, shower), note
    found = kept_certificate(directory, shower)
    with contextlib.suppress(OSError):
        _write_certificate(path, path.read_bytes())
    return found, note


def keep_certificate(directory: Path, shower: Shower) -> None:
    """Makes the certificate where there is none; checks the one that is there. Blocking.

    Raises:
        ConfigError: as `kept_certificate`.
        NotPermittedError, SystemCallError: it cannot be written.
    """
    path = key_path(directory, shower)
    _remove_early(path, shower)
    try:
        if not os.path.lexists(path):
            make_directory(directory, 0o700)
            _keep(path, new_certificate(shower))
    except OSError as error:
        what = f"cannot keep the certificate of the {shower.port}"
        raise from_oserror(what, error, where=str(path)) from error
    kept_certificate(directory, shower)


def kept_certificate(directory: Path, shower: Shower) -> ServerTls:
    """The certificate that is there. Blocking.

    Raises:
        ConfigError: there is none, it cannot be used, or others may have read the key.
    """
    path = key_path(directory, shower)
    if not os.path.lexists(path):
        raise ConfigError(
            f"the {shower.port} has no certificate yet",
            where=str(path),
            mend=f"{shower.maker.capitalize()} one.",
        )
    return _used(read_tls_key(path, shower.port, shower.key), path, shower)


def _used(content: bytes, path: Path, shower: Shower) -> ServerTls:
    try:
        return server_tls(content)
    except ValueError as error:
        raise ConfigError(
            f"the certificate of the {shower.port} cannot be used ({error})",
            where=str(path),
            mend=f"Remove the file: {shower.maker} a new one.",
        ) from None


def _remove_early(path: Path, shower: Shower) -> None:
    """Removes one that we have made (it ends never) and that does not count yet: an earlier release
    made it while the clock was wrong."""
    now = datetime.datetime.now(datetime.UTC).strftime(_DATE)
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = _VALIDITY.search(pem.der(pem.certificates(path.read_bytes())[0]))
        if found is not None:
            since = (
                found[3] or (b"19" if found[1] >= b"50" else b"20") + found[1] + found[2]
            ).decode()
            if since > now > _CLOCK_MIN:
                path.unlink()
                log.warning(
                    "the certificate of the %s in %s was made when the clock was wrong (it begins "
                    "at %s): another one is made",
                    *(shower.port, path, since),
                )


def _keep(path: Path, content: bytes) -> None:
    """Two may start at once: the first one's file is there to stay."""
    with contextlib.suppress(FileExistsError):
        write_new(path, content)
        _write_certificate(path, content)


def _write_certificate(path: Path, content: bytes) -> None:
    """Those in the text, unless they are there: somebody may have put another key in place."""
    text = b"\n".join(pem.certificates(content)) + b"\n"
    public = path.with_suffix(".crt")
    with contextlib.suppress(OSError):
        if public.read_bytes() == text:
            return
    descriptor, temporary = tempfile.mkstemp(dir=public.parent, prefix=f".{public.name}.")
    with open(descriptor, "wb") as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
    os.replace(temporary, public)


def new_certificate(shower: Shower = DONOR) -> bytes:
    """A key and a certificate for it, in PEM form."""
    # Here, as a daemon that finds its certificate needs none of it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    host = host_name()[:64]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
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
        .not_valid_before(_EVER)
        .not_valid_after(_FOR_EVER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(shower.name)]), critical=False)
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
