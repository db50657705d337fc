# SPDX-License-Identifier: Apache-2.0
"""`infiniswap ui`: prints a link that lets one browser in at a daemon's page."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infiniswap import config as configuration
from infiniswap.cli.common.donors import address_of
from infiniswap.cli.common.parser import add_shared
from infiniswap.control.host_name import host_name
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.control.messages import PageLink


def add_parser(subparsers: Any) -> None:
    """Adds the parser of `ui`."""
    parser = subparsers.add_parser(
        "ui",
        help="print a link to a daemon's page, for a browser",
        description="Prints a link to the page that a daemon serves at /ui. The link lets one "
        "browser in, once and within five minutes. The page shows what `infiniswap status` shows, "
        "as it happens, and changes nothing.",
    )
    parser.add_argument(
        "donor",
        metavar="DONOR",
        nargs="?",
        help="name or control address of the daemon that serves the page (default: the daemon of "
        "this host)",
    )
    add_shared(parser, "--config", "--secret-file")


def run(args: argparse.Namespace) -> int:
    """Prints the link; 0 when the daemon gave one."""
    from infiniswap.control.access import client_config
    from infiniswap.control.client import make_page_link

    config = configuration.load(args.config, {"cluster.secret_file": args.secret_file})
    address = reachable(config.daemon.listen)
    if args.donor is not None:
        address = address_of(args.donor, config)
    client = client_config(config, config.cluster.ask_s)
    made = asyncio.run(make_page_link(address, client))
    files = config.certificates()
    for line in said(address, made, None if files is None else files.certificate.parent):
        print(line)
    return 0


def reachable(listen: HostPort) -> HostPort:
    """Where this host reaches a daemon of its own that listens there."""
    if listen.is_wildcard:
        return replace(listen, host="::1" if ":" in listen.host else "127.0.0.1")
    return listen


def said(address: HostPort, made: PageLink, certificates: Path | None) -> list[str]:
    """The link, and what to know of it.

    Args:
        address: of the daemon.
        made: its answer.
        certificates: directory of this host's certificate, where the cluster has certificates.
    """
    digest = made.certificate.upper()
    pairs = ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
    lines = [f"https://{address.in_uri}/ui/#{made.link}", ""]
    if certificates is not None:
        lines = [
            f"https://{address.in_uri}/ui/",
            "",
            "The browser has to show a certificate of this cluster with the role consumer or "
            "operator. To make a file that browsers import, in the directory of one:",
            f"  cd {certificates} && openssl pkcs12 -export -inkey KEY -in CERTIFICATE -out me.p12",
        ]
    else:
        lines.append(
            f"Good once, within {made.valid_s // 60} minutes, for the page of {made.donor_name}. "
            "Who opens it first may read this cluster's status until that tab is closed."
        )
    lines.append(
        "The browser warns that it does not know the daemon's certificate. Accept the one with "
        f"this SHA-256 fingerprint: {pairs}"
    )
    if address.is_loopback:
        lines.append(
            "In a browser on another machine: first run, there, "
            f"ssh -L {address.port}:{address} {host_name()}"
        )
    return lines
