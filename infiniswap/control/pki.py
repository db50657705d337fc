# SPDX-License-Identifier: Apache-2.0
"""This host's certificate of the cluster's authority: loaded, checked, and read again when its
files change. `ssl` alone is used, as a device's process is locked in memory."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infiniswap import events
from infiniswap.control.mutual import (
    MutualContext,
    RefusedCertificateError,
    mutual_context,
    names_at,
)
from infiniswap.control.roles import Role, Subject, said, subject, uris_of
from infiniswap.control.tls import ServerTls, bounded, load_pem
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.secret import CertificateFiles, read_certificates

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often a process looks whether the files have changed."""
_DAY_S: Final = 86_400.0
_RENEW: Final = (
    "Get another certificate from the authority, put it in place of the old one, and reload."
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this host shows, and trusts.

    Attributes:
        subject: who it is.
        shown: its names, for sentences.
        since_s, until_s: when its certificate counts, in Unix time.
        file: of the certificate.
        digest: of what the files had.
        client: context for connections to donors.
        server: for a port of this host; None: it was loaded for a command.
    """

    subject: Subject
    shown: str
    since_s: float
    until_s: float
    file: Path
    digest: bytes
    client: MutualContext
    server: ServerTls | None

    def problem(self, now_s: float) -> str:
        """Why its certificate does not count now; empty: it does."""
        if now_s > self.until_s:
            return (
                f"the certificate of this host ({self.shown}) has expired, on {day(self.until_s)}"
            )
        if now_s < self.since_s:
            return (
                f"the certificate of this host ({self.shown}) is not valid before "
                f"{day(self.since_s)}, and the clock of this host says {day(now_s)}"
            )
        return ""

    def warning(self, now_s: float) -> str:
        """As problem; also a sentence when less than a third of its life is left."""
        left_s = self.until_s - now_s
        if (problem := self.problem(now_s)) or 3 * left_s >= self.until_s - self.since_s:
            return problem
        return (
            f"the certificate of this host ({self.shown}) expires in {_span(left_s)}, on "
            f"{day(self.until_s)}"
        )


def day(unix_s: float) -> str:
    """A time as people write it, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def _span(seconds: float) -> str:
    for size, unit in ((_DAY_S, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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
    read = read_certificates(files)
    shown = read.chain + b"\n" + read.key
    try:
        authority = read.authority.decode("ascii")
        mutual_context(server=False, authority=authority, shown=None)
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the authority's certificate cannot be used: {error}",
            where=str(files.ca),
            mend="Name the file ca.pem of the authority in [cluster] ca_file.",
        ) from None
    decoded = _decoded(files, authority, shown, is_server=role is Role.DONOR)
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
    server = None
    if role is not None:
        context = mutual_context(server=True, authority=authority, shown=None)
        server = ServerTls(context, load_pem(context, shown), cluster)
    return Credentials(
        subject=found,
        shown=said(names),
        since_s=float(ssl.cert_time_to_seconds(decoded["notBefore"])),
        until_s=float(ssl.cert_time_to_seconds(decoded["notAfter"])),
        file=files.certificate,
        digest=hashlib.sha256(read.authority + b"\0" + shown).digest(),
        client=mutual_context(server=False, authority=authority, shown=shown),
        server=server,
    )


def _decoded(
    files: CertificateFiles, authority: str, shown: bytes, *, is_server: bool
) -> dict[str, Any]:
    """Our certificate, as other ends see it in its role."""
    where, mend = str(files.certificate), "Name the certificate and the key that belong together."
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
        reason = str(getattr(error, "reason", None) or error)
        what = f"certificate and key of this host cannot be used ({reason})"
    raise ConfigError(what, where=where, mend=mend)


def check_date(credentials: Credentials) -> None:
    """Refuses a certificate that is out of date.

    Raises:
        ConfigError: it is.
    """
    if problem := credentials.problem(time.time()):
        raise ConfigError(
            problem, where=str(credentials.file), mend=f"{_RENEW} If it is new, correct the clock."
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
    ) -> None:
        self._files = files
        self._cluster = cluster
        self._role = role
        self._clock = clock
        self._read = self._seen = self._signature()
        self.now = load(files, cluster, role)
        self.failure = ""
        self._warned = ""

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
            found = load(self._files, self._cluster, self._role)
            if problem := found.problem(self._clock()):
                raise ConfigError(problem, where=str(found.file))
        except InfiniswapError as error:
            former, self.failure = self.failure, f"{error}".rstrip(".")
            if former != self.failure:
                log.warning("%s", self.sentences()[0], extra=events.about(events.CERTIFICATE))
            return False
        self._read = self._seen = signature
        self.failure = ""
        if found.digest == self.now.digest:
            self._tell()
            return False
        self.now = found
        log.info(
            "the certificate of this host was renewed: it is good until %s", day(found.until_s)
        )
        self._tell()
        return True

    def sentences(self) -> list[str]:
        """What an administrator should know of it."""
        failure = (
            f"the certificate files have changed and cannot be used, so the former certificate is "
            f"still shown: {self.failure}"
        )
        warning = self.now.warning(self._clock())
        return [*([failure] if self.failure else []), *([warning] if warning else [])]

    def _tell(self) -> None:
        warning = self.now.warning(self._clock())
        kind = warning.partition(" expires in ")[0]
        if warning and kind != self._warned:
            log.warning("%s", warning, extra=events.about(events.CERTIFICATE))
        self._warned = kind

    def _signature(self) -> _Signature:
        return tuple(map(_stamp, (self._files.ca, self._files.certificate, self._files.key)))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino
