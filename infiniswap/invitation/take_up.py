# SPDX-License-Identifier: Apache-2.0
"""The inviting host adds the daemon of its guest to its own list of donors."""

from __future__ import annotations

from pathlib import Path

from infiniswap import config as configuration
from infiniswap.config_text import toml_value
from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.invitation.membership import replace_text
from infiniswap.invitation.offer import is_reachable
from infiniswap.peers import PEERS_MAX
from infiniswap.toml_lines import with_keys
from infiniswap.units import HostPort, parse_host_port


def take_up(path: Path, inviter: str, lends: str) -> str:
    """Adds a donor to the list that devices of this host read. Blocking; never raises.

    Args:
        path: of this host's configuration.
        inviter: name of this host, for sentences.
        lends: control address of the new donor, as its host says.

    Returns:
        What was done, or what the administrator has to do.
    """
    try:
        address = parse_host_port(lends)
    except UsageError:
        return "the new host gives no address for its daemon"
    if not is_reachable(address):
        return f"{address} leads to the new host itself only: give its daemon another address"
    try:
        config = configuration.load(path, environ={})
        if config.cluster.discovery == "mqtt":
            return f"devices find {address} on the broker once its daemon runs"
        if address in config.peers():
            return f"{inviter} has {address} among its donors already"
        if len(config.peers()) >= PEERS_MAX:
            return (
                f"{inviter} has {PEERS_MAX} donors already, and a list may have at most that many"
            )
        if config.cluster.peers_file is not None:
            return _to_list(config.cluster.peers_file, inviter, address)
        peers = toml_value((*config.cluster.peers, address), {})
        replace_text(path, lambda text: with_keys(text, {"cluster.peers": peers}))
    except (InfiniswapError, OSError, ValueError) as error:
        why = error.what if isinstance(error, InfiniswapError) else str(error)
        return f'on {inviter}, add "{address}" to peers under [cluster] in {path} ({why})'
    return (
        f"{inviter} has added {address} to cluster.peers in {path}. Other hosts with a list of "
        "their own need that address as well, and running devices a reload"
    )


def _to_list(path: Path, inviter: str, address: HostPort) -> str:
    def added(text: str) -> str:
        newline = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{newline}{address}\n"

    replace_text(path, added)
    return f"{inviter} has added {address} to {path}, and its devices read that within seconds"
