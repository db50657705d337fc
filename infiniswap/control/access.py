# SPDX-License-Identifier: Apache-2.0
"""What a process shows donors: keys of the cluster secret, or a certificate. Configured."""

from __future__ import annotations

from infiniswap.config import Config
from infiniswap.control.client import ClientConfig
from infiniswap.control.pki import check_date, load
from infiniswap.control.roles import Role


def client_config(config: Config, connect_s: float) -> ClientConfig:
    """For a command, which ends soon. Blocking.

    Args:
        config: names the files.
        connect_s: see ClientConfig.

    Raises:
        ConfigError: secret or certificate cannot be used.
    """
    files = config.certificates()
    if files is None:
        return ClientConfig(keys=config.keys(), connect_s=connect_s)
    credentials = load(files, config.cluster.name)
    check_date(credentials)
    return ClientConfig(credentials=credentials, connect_s=connect_s)


def check_credentials(config: Config, role: Role | None = None, *, serves: bool = False) -> None:
    """Reads this host's secrets, or its certificate. Blocking.

    Args:
        config: names the files.
        role: that the certificate has to have; None: any.
        serves: see `load`.

    Raises:
        ConfigError: one cannot be used, or is out of date.
    """
    config.keys()
    config.second_keys()
    files = config.certificates()
    if files is not None:
        check_date(load(files, config.cluster.name, role, serves=serves))
