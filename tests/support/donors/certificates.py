# SPDX-License-Identifier: Apache-2.0
"""Certificates of a cluster's authority, in date or not, for hosts with any roles."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from infiniswap.control.client import ClientConfig
from infiniswap.control.pki import load
from infiniswap.control.roles import Role
from infiniswap.donor.authority import Pair, Period, new_authority, new_certificate, period
from infiniswap.secret import CertificateFiles

CLUSTER = "default"
DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)
EXPIRED = Period(NOW - 30 * DAY, NOW - DAY)
FUTURE = Period(NOW + DAY, NOW + 30 * DAY)
BOTH = (Role.DONOR, Role.CONSUMER)


class Authority:
    """Signs, and writes files below a directory."""

    def __init__(self, directory: Path, cluster: str = CLUSTER, when: Period | None = None) -> None:
        self.directory = directory
        self.cluster = cluster
        self.pair = new_authority(cluster, when)

    def files(
        self,
        host: str,
        roles: Iterable[Role],
        when: Period | None = None,
        *,
        cluster: str = "",
        accepts: Authority | None = None,
    ) -> CertificateFiles:
        """Of a host; `accepts`: whose certificates it accepts, where that is another authority."""
        place = self.directory / host
        place.mkdir(parents=True, exist_ok=True)
        files = CertificateFiles(place / "ca.pem", place / "certificate.pem", place / "key.pem")
        files.ca.write_bytes((accepts or self).pair.certificate)
        self.renew(files, host, roles, when, cluster=cluster)
        return files

    def renew(
        self,
        files: CertificateFiles,
        host: str,
        roles: Iterable[Role],
        when: Period | None = None,
        *,
        cluster: str = "",
    ) -> Pair:
        """Another certificate under the same names."""
        made = new_certificate(
            self.pair, cluster or self.cluster, host, tuple(roles), when or period(30)
        )
        files.key.touch()
        files.key.chmod(0o600)
        files.key.write_bytes(made.key)
        files.certificate.write_bytes(made.certificate)
        return made


def settings(files: CertificateFiles) -> dict[str, object]:
    """As keys of `configured`."""
    return {
        "cluster__secret_file": None,
        "cluster__ca_file": files.ca,
        "cluster__certificate_file": files.certificate,
        "cluster__key_file": files.key,
    }


def environment(files: CertificateFiles) -> dict[str, str]:
    """As variables of a daemon, a device or a command."""
    return {
        "INFINISWAP_CLUSTER_SECRET_FILE": "",
        "INFINISWAP_CLUSTER_CA_FILE": str(files.ca),
        "INFINISWAP_CLUSTER_CERTIFICATE_FILE": str(files.certificate),
        "INFINISWAP_CLUSTER_KEY_FILE": str(files.key),
    }


def client_with(files: CertificateFiles, cluster: str = CLUSTER) -> ClientConfig:
    """A consumer, or a command, that shows these; also where they are out of date."""
    return ClientConfig(credentials=load(files, cluster), connect_s=60.0, request_s=60.0)
