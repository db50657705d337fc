# SPDX-License-Identifier: Apache-2.0
"""The keys that a daemon serves with."""

from __future__ import annotations

from infiniswap.config import Config
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.keys import Keys
from infiniswap.secret import host_secret_path, make_host_secret


def donor_keys(config: Config) -> Keys:
    """The keys of the cluster secret. Where none is configured, the daemon makes a secret for its
    host: whoever may read that borrows memory. Blocking.

    Raises:
        ConfigError: the secret cannot be used, or is a session key.
        InfiniswapError: none can be made.
    """
    state_dir = config.daemon.state_dir
    if config.cluster.secret_file is None:
        try:
            make_host_secret(state_dir)
        except InfiniswapError as error:
            error.mend = (
                "Set daemon.state_dir to a directory that this user may write to, run it with "
                "sudo, or name a cluster secret in [cluster] secret_file."
            )
            raise
    keys = config.keys()
    where = str(config.cluster.secret_file or host_secret_path(state_dir))
    if keys is None:
        raise ConfigError(
            "this user may not read the secret of this host",
            where=where,
            mend="Run it as the user that it belongs to, or set daemon.state_dir to another "
            "directory.",
        )
    return _whole(keys, where)


def second_keys(config: Config) -> Keys | None:
    """The keys of the second secret, None without one. Blocking.

    Raises:
        ConfigError: the secret cannot be used, or is a session key.
    """
    keys = config.second_keys()
    return None if keys is None else _whole(keys, str(config.cluster.second_secret_file))


def _whole(keys: Keys, where: str) -> Keys:
    if keys.operator is None:
        raise ConfigError(
            "this is a session key, and a daemon needs the cluster secret itself",
            where=where,
            mend="Copy the cluster secret from another host to this one.",
        )
    return keys
