# SPDX-License-Identifier: Apache-2.0
"""`infiniswap join`: brings this host into a cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from infiniswap import config as configuration
from infiniswap.control.host_name import host_name
from infiniswap.control.listening import check_reach
from infiniswap.control.text import printable
from infiniswap.errors import ConflictError, InfiniswapError, UsageError
from infiniswap.units import CONTROL_PORT, HostPort, parse_host_port

if TYPE_CHECKING:
    from infiniswap.invitation.guest import GuestConnection
    from infiniswap.invitation.membership import Joining
    from infiniswap.invitation.messages import Offer
    from infiniswap.invitation.token import Token

_LINE_MAX: Final = 4096
_UNSENT: Final = "Nothing was sent, so this did not use the token up."
_AGAIN: Final = (
    "The token is used up: run `infiniswap invite` again on the other host, and join with that one."
)


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "join",
        help="bring this host into a cluster, with a token of `infiniswap invite`",
        description="Brings this host into the cluster of the host that printed the token: writes "
        "the cluster secret (or a certificate), the donors and the settings of the broker to the "
        "configuration and to files beside it. Other settings there stay. Before it sends "
        "anything, it compares the certificate of the host that answers with the token.",
    )
    parser.add_argument(
        "token",
        metavar="TOKEN",
        help="what `infiniswap invite` printed on the other host; - reads it from standard input, "
        "so that other users of this host do not see it",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"configuration to write (default: INFINISWAP_CONFIG, or "
        f"{configuration.DEFAULT_PATH}); the other files go to its directory",
    )
    parser.add_argument(
        "--lend",
        action="store_true",
        help="also let the daemon of this host listen for other hosts, and tell the inviting host "
        "its address",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="with --lend: address of that daemon (default: the address that leads to the inviting "
        f"host, port {CONTROL_PORT})",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="leave the cluster to which this host belongs now",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be written, without secrets; the token stays good",
    )


@dataclass(frozen=True, slots=True)
class _Host:
    """This host before it joins.

    Attributes:
        path: of its configuration.
        before: what that has.
        member: keys that show the cluster to which it belongs.
    """

    path: Path
    before: configuration.Config
    member: list[str]


def run(args: argparse.Namespace) -> int:
    """Joins.

    Raises:
        ConflictError: this host belongs to a cluster.
        InfiniswapError: see infiniswap.invitation.
    """
    from infiniswap.invitation import membership
    from infiniswap.invitation.token import decode

    token = decode(_token_text(args.token))
    if args.listen is not None:
        if not args.lend:
            raise UsageError("--listen needs --lend")
        listen = parse_host_port(args.listen)
        check_reach(listen, "--listen")
        if listen.is_loopback:
            raise UsageError(
                "other hosts cannot reach this address",
                where=f"--listen {args.listen}",
                mend="Name an address of this host in their network, or leave --listen out.",
            )
    path = Path(os.path.realpath(configuration.file_path(args.config)))
    before = configuration.Config()
    if os.path.lexists(path):
        before = configuration.load(path, environ={})
    host = _Host(path, before, membership.memberships(before))
    if host.member and not args.replace and not args.dry_run:
        raise ConflictError(
            f"this host belongs to a cluster already: {', '.join(host.member)}",
            where=str(path),
            mend="--replace puts the new cluster's settings in their place; with --dry-run it "
            f"shows them first. {_UNSENT}",
        )
    changed = ("daemon.listen",) if args.lend and before.daemon.listen.is_loopback else ()
    membership.check_changeable(path, changed, _UNSENT)
    is_new = not path.parent.exists()
    if not args.dry_run:
        membership.check_writable(path, _UNSENT)
    try:
        return asyncio.run(_join(args, token, host))
    except InfiniswapError:
        if is_new:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        raise
    except KeyboardInterrupt:
        print(
            "infiniswap: interrupted, and the token may be used up. `infiniswap join` with another "
            "one says whether this host belongs to the cluster already",
            file=sys.stderr,
        )
        raise


def _token_text(text: str) -> str:
    if text != "-":
        return text
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        print("Token: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline(_LINE_MAX)


async def _join(args: argparse.Namespace, token: Token, host: _Host) -> int:
    from infiniswap.donor.authority import new_request
    from infiniswap.invitation import guest, membership, messages

    made = await asyncio.to_thread(new_request)
    async with guest.connected(token) as connection:
        listen = _listen(args, connection, host.before)
        lends = _lends(listen or host.before.daemon.listen, connection)
        offer = await guest.present(
            connection,
            messages.InvitationRequest(
                version=messages.VERSION,
                password=token.password,
                host=host_name(),
                csr=made.certificate.decode(),
                lends=lends,
                preview=args.dry_run,
            ),
        )
        again = "" if args.dry_run else _AGAIN
        wanted = await asyncio.to_thread(
            membership.plan, host.path, offer, made.key, listen, again, preview=args.dry_run
        )
        if args.dry_run:
            _show(wanted, host)
            return 0
        await asyncio.to_thread(membership.apply, wanted, lambda: _compose(wanted), _AGAIN)
        noted = await guest.confirm(connection, lends)
    _report(wanted, offer, host, connection)
    _report_lending(lends, noted)
    return 0


def _compose(wanted: Joining) -> str:
    """A whole configuration, where this host has none yet."""
    from infiniswap.cli.init import compose

    return compose(wanted.path, given=wanted.set_keys, command="join")


def _listen(
    args: argparse.Namespace, connection: GuestConnection, before: configuration.Config
) -> HostPort | None:
    """Where the daemon shall listen; None: as it is configured."""
    if args.listen is not None:
        return parse_host_port(args.listen)
    if not args.lend or not before.daemon.listen.is_loopback:
        return None
    return HostPort(connection.own, before.daemon.listen.port)


def _lends(listen: HostPort, connection: GuestConnection) -> str:
    """The address for others; empty: the daemon serves this host alone."""
    if listen.is_loopback:
        return ""
    return str(HostPort(connection.own, listen.port) if listen.is_wildcard else listen)


def _show(wanted: Joining, host: _Host) -> None:
    for file in wanted.files:
        if not file.is_there:
            print(f"would write: {file.path} (mode {file.mode:04o})")
    print(f"would write: {wanted.path}, with")
    for key, value in wanted.set_keys.items():
        print(f"  {key} = {printable(value)}")
    gone = [key for key in host.member if wanted.values.get(key) is None]
    if gone:
        print(f"would take away: {', '.join(gone)}")
    if host.member:
        print("This host belongs to a cluster already: joining needs --replace.")
    print("Nothing was written, and the token is still good.")


def _report(wanted: Joining, offer: Offer, host: _Host, connection: GuestConnection) -> None:
    from infiniswap.device.spec.rundir import running_names

    for file in wanted.files:
        if not file.is_there:
            print(f"wrote: {file.path}")
    print(f"wrote: {wanted.path}")
    print(
        f"This host belongs to the cluster {offer.cluster!r} of {offer.inviter} "
        f"({connection.address.host})."
    )
    named = {str(file.path) for file in wanted.files}
    for key in host.member:
        section, _, name = key.partition(".")
        former = getattr(getattr(host.before, section), name)
        if isinstance(former, Path) and str(former) not in named and former.exists():
            print(f"left in place, and no longer used: {former}")
    if running := running_names(host.before.device.run_dir):
        print(
            f"note: these devices run on with their former settings: {', '.join(running)}. To move "
            "one to this cluster, run `infiniswap device stop` and `infiniswap device start`"
        )
    for note in offer.notes:
        print(f"note: {note}")
    print(
        "Next:\n"
        "  the donors:              sudo infiniswap status\n"
        "  use their memory:        sudo infiniswap run --local 4G -- COMMAND"
    )


def _report_lending(lends: str, noted: str | None) -> None:
    if not lends:
        return
    print(f"  lend memory at {lends}: sudo infiniswap daemon (restart it if it runs)")
    if noted is None:
        print(f"note: the inviting host did not answer: add {lends} to its donors by hand")
    elif noted:
        print(f"note: {noted}")
