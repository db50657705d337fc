# SPDX-License-Identifier: Apache-2.0
"""This host's certificate of the cluster's authority: loaded, checked, and read again when its
files change. `ssl` alone is used, as a device's process is locked in memory."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from infiniswap import events
from infiniswap.control import pem
from infiniswap.control.dated import Dated, authority_certificate, day, host_certificate
from infiniswap.control.mutual import (
    MutualContext,
    RefusedCertificateError,
    mutual_context,
    names_at,
)
from infiniswap.control.roles import Role, Subject, said, subject, uris_of
from infiniswap.control.tls import ServerTls, bounded, digest_of, load_pem
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.secret import CertificateFiles, CertificateTexts, read_certificates

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often a process looks whether the files have changed."""
_CHANGED: Final = "the files of certificates have changed"
_COPY: Final = "Copy certificate and key to this host again, and name the two that belong together."


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this host shows, and trusts.

    Attributes:
        subject: who it is.
        shown: its names, for sentences.
        own: its certificate.
        authorities: those that it trusts.
        needed: its own certificate, and those of the authorities that make others believe it.
        trusted: whatever the file of the authorities has, as `digest_of` the certificates.
        file: of the certificate.
        texts: that the files had.
        client: context for connections to donors.
        server: for a port of this host; None: it was loaded for a command.
    """

    subject: Subject
    shown: str
    own: Dated
    authorities: tuple[Dated, ...]
    needed: tuple[Dated, ...]
    trusted: frozenset[bytes]
    file: Path
    texts: CertificateTexts = field(repr=False)
    client: MutualContext
    server: ServerTls | None

    @property
    def until_s(self) -> float:
        """When others no longer believe it, in Unix time."""
        return min(each.until_s for each in self.needed)

    def problem(self, now_s: float) -> Dated | None:
        """What keeps others from believing it now; None: nothing."""
        return next((each for each in self.needed if each.problem(now_s)), None)

    def warnings(self, now_s: float) -> list[Dated]:
        """What has expired, or expires soon, or is not valid yet."""
        return [each for each in (self.own, *self.authorities) if each.warning(now_s)]


def load(
    files: CertificateFiles, cluster: str, role: Role | None = None, *, serves: bool = False
) -> Credentials:
    """Reads the files. Blocking. That the certificate is in date is left to `check_date`.

    Args:
        files: of this host.
        cluster: its name.
        role: that the certificate has to have; None: any.
        serves: a consumer's is also shown at a port, and has to be good for that.

    Raises:
        ConfigError: a file cannot be used, or the certificate is of another authority or cluster,
            or without the role.
    """
    return made_of(read_certificates(files), files, cluster, role, serves=serves)


def made_of(
    texts: CertificateTexts,
    files: CertificateFiles,
    cluster: str,
    role: Role | None,
    *,
    serves: bool = False,
) -> Credentials:
    """As `load`, of what the files have, or had.

    Raises:
        ConfigError: see `load`.
    """
    authority = _authority(texts.authority, files)
    _check_complete(texts, files)
    shown = texts.chain + b"\n" + texts.key
    decoded, chain = _decoded(files, authority, shown, is_server=role is Role.DONOR)
    if serves:
        _decoded(files, authority, shown, is_server=True)
    names = uris_of(decoded)
    try:
        found = subject(names, cluster)
    except ValueError as error:
        raise ConfigError(
            str(error),
            where=str(files.certificate),
            mend="Get a certificate for this cluster and host from the authority, or correct "
            "cluster.name.",
        ) from None
    if role is not None and role not in found.roles:
        raise ConfigError(
            f"the certificate of this host is for {said(names)}, and the role {role} is needed",
            where=str(files.certificate),
            mend=f"Get a certificate with infiniswap://{cluster}/{role}/HOST from the authority.",
        )
    client = mutual_context(server=False, authority=authority, shown=shown)
    try:
        own, trusted = host_certificate(said(names), decoded), _trusted(client)
    except ValueError as error:
        what = f"a date in the certificates of this host or the authority is none ({error})"
        raise ConfigError(what, where=str(files.certificate), mend=_COPY) from None
    anchors = frozenset(digest_of(pem.der(each)) for each in pem.certificates(texts.authority))
    server = None
    if role is not None:
        context = mutual_context(server=True, authority=authority, shown=None)
        server = ServerTls(context, load_pem(context, shown), cluster, anchors)
    vouching = (trusted.get(digest_of(each)) for each in chain)
    return Credentials(
        subject=found,
        shown=said(names),
        own=own,
        authorities=tuple(trusted.values()),
        needed=(own, *(each for each in vouching if each is not None)),
        trusted=anchors,
        file=files.certificate,
        texts=texts,
        client=client,
        server=server,
    )


def _authority(text: bytes, files: CertificateFiles) -> str:
    """The certificates of the authorities alone."""
    try:
        found = b"\n".join(pem.certificates(text)).decode("ascii", errors="replace")
        mutual_context(server=False, authority=found, shown=None)
    except ValueError as error:
        raise ConfigError(
            f"the certificate of the authority cannot be used: {error}",
            where=str(files.ca),
            mend="Copy the file ca.pem of the authority again, and name it in [cluster] ca_file.",
        ) from None
    return found


def _trusted(client: MutualContext) -> dict[bytes, Dated]:
    """The authorities, by `digest_of` their certificates. Raises ValueError."""
    keys = map(digest_of, client.get_ca_certs(binary_form=True))
    return dict(zip(keys, map(authority_certificate, client.get_ca_certs()), strict=True))


def _check_complete(texts: CertificateTexts, files: CertificateFiles) -> None:
    """Tells the two files apart, which OpenSSL gets as one text."""
    for look, text, path, noun in (
        (pem.certificates, texts.chain, files.certificate, "certificate"),
        (pem.check_key, texts.key, files.key, "key of the certificate"),
    ):
        try:
            look(text)
        except ValueError as error:
            raise ConfigError(
                f"the {noun} of this host cannot be used: {error}",
                where=str(path),
                mend=_COPY,
            ) from None


def _decoded(
    files: CertificateFiles, authority: str, shown: bytes, *, is_server: bool
) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Our certificate, as other ends see it in its role, and why they believe it."""
    where, mend = str(files.certificate), _COPY
    shower = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    bounded(shower)
    shower.check_hostname = False
    shower.verify_mode = ssl.CERT_NONE
    try:
        load_pem(shower, shown)
        looker = mutual_context(
            server=not is_server,
            authority=authority,
            shown=None if is_server else shown,
            check_time=False,
        )
        return names_at(shower, looker)
    except RefusedCertificateError as error:
        what = f"the certificate of this host ({error.presented}) {error.why}"
        mend = f"Get one from the authority of {files.ca}, for the use as client and as server."
    except (ValueError, ssl.SSLError) as error:
        what = f"certificate and key of this host cannot be used: {pem.why_unusable(error)}"
    raise ConfigError(what, where=where, mend=mend)


def check_date(credentials: Credentials) -> None:
    """Refuses a certificate that is out of date, or of an authority whose certificate is.

    Raises:
        ConfigError: it is.
    """
    now_s = time.time()
    if found := credentials.problem(now_s):
        raise ConfigError(
            found.problem(now_s),
            where=str(credentials.file),
            mend=f"{found.mend} If it is new, correct the clock.",
        )


_Signature = tuple[tuple[int, int, int] | None, ...]


class CertificateWatch:
    """The credentials of a process that goes on while others renew them. Not for two threads at
    once.

    A file that cannot be used changes nothing: the last good ones stay in force. Whoever renews a
    certificate replaces one file after the other, so a change counts when two looks in a row have
    found the same.

    Args:
        files, cluster, role: see `load`.
        clock: Unix time in seconds.
        former: what a predecessor showed last; in force where the files cannot be used now.

    Attributes:
        now: the credentials in force.
        failure: why what the files have now is not in force; empty: it is.

    Raises:
        ConfigError: see `load`.
    """

    def __init__(
        self,
        files: CertificateFiles,
        cluster: str,
        role: Role,
        clock: Callable[[], float] = time.time,
        former: CertificateTexts | None = None,
    ) -> None:
        self._files = files
        self._cluster = cluster
        self._role = role
        self._clock = clock
        self._read = self._seen = self._signature()
        self.failure = ""
        self.now = load(files, cluster, role) if former is None else self._load_or(former)
        self._warned: frozenset[str] = frozenset()

    def _load_or(self, former: CertificateTexts) -> Credentials:
        try:
            return self._load_good()
        except InfiniswapError as error:
            self.failure = f"{error}".rstrip(".")
        return made_of(former, self._files, self._cluster, self._role)

    def _load_good(self) -> Credentials:
        """What the files have now. Raises InfiniswapError: it could not be shown."""
        found = load(self._files, self._cluster, self._role)
        if problem := found.problem(now_s := self._clock()):
            raise ConfigError(problem.problem(now_s), where=str(found.file))
        return found

    def look(self, *, at_once: bool = False) -> bool:
        """Reads the files again if they have changed. Blocking; never raises.

        Args:
            at_once: they are complete now.

        Returns:
            Whether other credentials are in force.
        """
        signature = self._signature()
        if signature == self._read and not self.failure and not at_once:
            self._seen = signature
            self._tell()
            return False
        if signature != self._seen and not at_once:
            self._seen = signature
            return False
        try:
            found = self._load_good()
        except InfiniswapError as error:
            former, self.failure = self.failure, f"{error}".rstrip(".")
            if former != self.failure:
                log.warning("%s", self._failures()[0], extra=events.about(events.CERTIFICATE))
            return False
        self._read = self._seen = signature
        self.failure = ""
        if found.texts == self.now.texts:
            self._tell()
            return False
        self.now = found
        log.info(
            "the certificate files were renewed: the certificate of this host is good until %s",
            day(found.until_s),
        )
        self._tell()
        return True

    def sentences(self) -> list[str]:
        """What an administrator should know of it."""
        return [*self._failures(), *self._warnings().values()]

    def _failures(self) -> list[str]:
        said = "the certificate files have changed and cannot be used, so the former certificate is"
        return [f"{said} still shown: {self.failure}"] if self.failure else []

    def news(self, *, has_changed: bool) -> tuple[str, ...]:
        """What a reload says of the files. `has_changed`: what `look` has returned."""
        return (_CHANGED,) if has_changed else tuple(self._failures())

    def _warnings(self) -> dict[str, str]:
        """By what stays the same of a sentence while time passes."""
        now_s = self._clock()
        found = (each.warning(now_s) for each in self.now.warnings(now_s))
        return {sentence.partition(" expires in ")[0]: sentence for sentence in found}

    def _tell(self) -> None:
        warnings = self._warnings()
        for kind in warnings.keys() - self._warned:
            log.warning("%s", warnings[kind], extra=events.about(events.CERTIFICATE))
        self._warned = frozenset(warnings)

    def _signature(self) -> _Signature:
        return tuple(map(_stamp, (self._files.ca, self._files.certificate, self._files.key)))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino
