# SPDX-License-Identifier: Apache-2.0
"""`infiniswap invite`: lets one other host into the cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from infiniswap import config as configuration
from infiniswap.cli.common import certificates
from infiniswap.cli.common.parser import add_shared
from infiniswap.control.host_name import host_name
from infiniswap.control.listening import check_reach
from infiniswap.control.roles import Role
from infiniswap.documents import page
from infiniswap.errors import ConflictError, DeadlineError, UsageError
from infiniswap.units import INVITATION_PORT, HostPort, parse_host_port

if TYPE_CHECKING:
    from infiniswap.invitation.offer import Signing, Terms
    from infiniswap.invitation.port import Guest

_NOWHERE: Final = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses for documents (RFC 5737, RFC 3849), to ask which address leads out. Nothing is sent."""


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "invite",
        help="let another host into the cluster",
        description="Prints a command for a host that shall join the cluster, and waits until that "
        "host has joined. The command has a token, which is good once and for ten minutes, while "
        "`invite` runs. The new host gets the cluster secret (or a certificate), the donors and "
        "the settings of the broker over TLS, from the host whose certificate the token names. "
        "Ctrl-C withdraws the invitation.",
    )
    add_shared(parser, "--config", "--secret-file")
    parser.add_argument(
        "--new",
        action="store_true",
        help="first make a cluster of this host: a secret, and a configuration whose daemon "
        "listens for other hosts",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help=f"address at which the new host reaches this one (default: every address, port "
        f"{INVITATION_PORT})",
    )
    parser.add_argument(
        "--session-key",
        action="store_true",
        help="give the session key in place of the cluster secret: the new host borrows memory, "
        "but cannot drain donors",
    )
    certificates.add_host_options(
        parser, "directory of the cluster's certificate authority, which signs for the new host"
    )


def run(args: argparse.Namespace) -> int:
    """Waits for the guest; 0 when it has joined.

    Raises:
        DeadlineError: nobody came in time, or the guest has not confirmed.
    """
    path = Path(os.path.realpath(configuration.file_path(args.config)))
    listen = _listen(args.listen)
    addresses = _addresses(listen)
    if args.new:
        _make_cluster(args, path, addresses[0])
    config = configuration.load(args.config, {"cluster.secret_file": args.secret_file})
    terms = _terms(args, config, path, addresses)
    return _wait(terms, path, listen, addresses)


def _listen(text: str | None) -> HostPort:
    """An empty host is every address."""
    if text is None:
        return HostPort("", INVITATION_PORT)
    found = parse_host_port(text, INVITATION_PORT)
    return HostPort("", found.port) if found.is_wildcard else found


def _addresses(listen: HostPort) -> list[str]:
    """Addresses of this host, the likeliest first."""
    from infiniswap.cli.init import own_addresses

    if listen.host:
        check_reach(listen, "--listen")
        return [listen.host]
    found = sorted(own_addresses(), key=lambda text: (ipaddress.ip_address(text).version, text))
    leading = [text for text in map(_leading_out, _NOWHERE) if text in found]
    if not found:
        raise UsageError(
            "this host has no address that others could reach",
            mend="Connect it to a network, or give --listen HOST.",
        )
    return list(dict.fromkeys([*leading, *found]))


def _leading_out(nowhere: tuple[str, socket.AddressFamily]) -> str:
    """The address of this host on its way out; empty: there is no way."""
    address, family = nowhere
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, INVITATION_PORT))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def _make_cluster(args: argparse.Namespace, path: Path, address: str) -> None:
    """Writes a secret and a configuration, as two calls of `infiniswap init` do.

    Raises:
        ConflictError: this host belongs to a cluster.
        InfiniswapError: they cannot be written.
    """
    from infiniswap.cli.init import compose
    from infiniswap.config_text import toml_value
    from infiniswap.invitation import membership
    from infiniswap.secret import new_secret, read_secret

    if args.secret_file is not None or args.authority is not None:
        raise UsageError("--new makes a secret: leave --secret-file and --authority out")
    before = configuration.Config()
    if os.path.lexists(path):
        before = configuration.load(path, environ={})
    if found := membership.memberships(before):
        raise ConflictError(
            f"this host belongs to a cluster already: {', '.join(found)}",
            where=str(path),
            mend="Leave --new out to invite another host into that cluster.",
        )
    membership.check_writable(path)
    secret = path.with_name(membership.SECRET_FILE)
    files: tuple[membership.NewFile, ...] = ()
    if os.path.lexists(secret):  # of `infiniswap init --secret`
        read_secret(secret)
    else:
        files = (membership.NewFile(secret, f"{new_secret()}\n".encode(), 0o600, is_there=False),)
    values = {"cluster.secret_file": toml_value(secret, {})}
    if before.daemon.listen.is_loopback:
        values["daemon.listen"] = toml_value(HostPort(address, before.daemon.listen.port), {})
    wanted = membership.Joining(path, files, values)
    membership.apply(wanted, lambda: compose(path, given=values, command="invite"))
    for file in files:
        print(f"wrote: {file.path}")
    print(f"wrote: {path}\n", flush=True)


def _terms(
    args: argparse.Namespace, config: configuration.Config, path: Path, addresses: list[str]
) -> Terms:
    from infiniswap.invitation.offer import terms

    signing = _signing(args)
    own, slab_bytes = _own_daemon(config, addresses)
    return terms(
        config,
        path,
        config.daemon.name or host_name(),
        own,
        slab_bytes,
        session_key=args.session_key,
        signing=signing,
    )


def _signing(args: argparse.Namespace) -> Signing | None:
    if args.authority is None:
        if args.host or args.role or args.days is not None:
            raise UsageError("--host, --role and --days need --authority DIR")
        return None
    from infiniswap.donor.authority import period
    from infiniswap.invitation.offer import Signing

    if not args.host or not args.role:
        raise UsageError(
            "--authority needs --host NAME and at least one --role",
            mend="A host that lends and borrows has --role donor --role consumer.",
        )
    roles = tuple(role for role in Role if role in args.role)
    days = certificates.checked_days(args.days)
    authority = certificates.read_authority(args.authority)
    return Signing(authority, args.host, roles, period(days))


def _own_daemon(
    config: configuration.Config, addresses: list[str]
) -> tuple[list[HostPort], int | None]:
    """Where others reach this host's daemon, and its slabs; asks it, as it may have been started
    with other flags than the configuration has."""
    from infiniswap.control.access import client_config
    from infiniswap.invitation.offer import is_reachable
    from infiniswap.watch.asking import ask

    if config.cluster.trust_file is None:
        return [], None
    listen = config.daemon.listen
    check_reach(listen)
    asked = [HostPort(address, listen.port) for address in addresses]
    if is_reachable(listen):
        asked = [listen]
    rows = asyncio.run(ask(asked, client_config(config, config.cluster.ask_s)))
    answers = {row.address: row.status for row in rows if row.status is not None}
    if answers:
        return list(answers), next(iter(answers.values())).slab_bytes
    if is_reachable(listen) or listen.is_wildcard:
        print(
            f"infiniswap: note: the daemon of this host does not answer at {asked[0]}: start it "
            "with `infiniswap daemon`, so that the new host finds memory here",
            file=sys.stderr,
        )
        return asked, None
    return [], None


def _wait(terms: Terms, path: Path, listen: HostPort, addresses: list[str]) -> int:
    from infiniswap.invitation import port, token
    from infiniswap.invitation.frames import new_tls
    from infiniswap.invitation.once import Invitation
    from infiniswap.invitation.take_up import take_up

    password = os.urandom(token.PASSWORD_BYTES)
    tls = new_tls()
    inviter = terms.offer.inviter
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in port.listen(listen)]
        number = listeners[0].getsockname()[1]
        places = tuple(HostPort(host, number) for host in addresses[: token.ADDRESSES_MAX])
        invitation = Invitation(password, port.boot_clock())
        serving = port.InvitingPort(
            invitation, tls, terms.offer_to, lambda lends: take_up(path, inviter, lends)
        )
        told = token.encode(token.Token(places, tls.digest, password))

        async def wait() -> Guest:  # printed within the loop, which handles Ctrl-C by then
            _say(terms, told, places)
            return await serving.serve(listeners)

        try:
            guest = asyncio.run(wait())
        except KeyboardInterrupt:
            given = invitation.given_to
            end = f"is used up: {given} has it" if given else "is withdrawn"
            print(f"infiniswap: the invitation {end}", file=sys.stderr)
            raise
    return _report(guest)


def _say(terms: Terms, text: str, places: tuple[HostPort, ...]) -> None:
    gets = {
        "secret": "the cluster secret",
        "session-key": "the session key, so it cannot drain donors",
        "certificate": "a certificate",
    }[terms.offer.kind]
    if terms.signing is not None:
        gets += f" as {terms.signing.host} ({', '.join(terms.signing.roles)})"
    print(
        "Within ten minutes, type this on the host that shall join:\n\n"
        f"    sudo infiniswap join {text}\n\n"
        f"It gets {gets}. It connects to {' or '.join(map(str, places))} by TCP.\n"
        "Waiting; Ctrl-C withdraws the invitation.",
        flush=True,
    )


def _report(guest: Guest) -> int:
    who = f"{guest.name} ({guest.address})"
    if guest.problem:
        raise DeadlineError(
            f"{who} has got the invitation, but did not confirm that it has joined: "
            f"{guest.problem}",
            mend="Look at what `infiniswap join` says there, and run `infiniswap invite` again if "
            "it failed. If you do not know that host, change the cluster secret at once: "
            f"{page('security.md')} says how.",
        )
    print(f"joined: {who}")
    if guest.note:
        print(guest.note)
    return 0
