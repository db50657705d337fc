# SPDX-License-Identifier: Apache-2.0
"""`infiniswap donor leases|drain|undrain|ticket`: says who uses a donor's memory; empties a donor
before maintenance, and ends that; opens a donor's memory to programs that speak NBD."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from infiniswap import config as configuration
from infiniswap.cli.common.donors import address_of
from infiniswap.cli.common.leases import table
from infiniswap.cli.common.output import plain_console, results_console
from infiniswap.cli.common.parser import add_shared
from infiniswap.control.host_name import host_name
from infiniswap.control.text import printable
from infiniswap.errors import DeadlineError, InfiniswapError, NoDonorError
from infiniswap.units import HostPort, counted, format_size_short
from infiniswap.watch import leases

if TYPE_CHECKING:
    from infiniswap.control.client import ClientConfig
    from infiniswap.control.messages import DrainInfo, Status

_POLL_S = 0.5
_STUCK_S = 30.0
_COUNT_MAX = 65536


def add_parser(subparsers: Any) -> None:
    """Adds the parser of `donor`."""
    parser = subparsers.add_parser(
        "donor",
        help="show who uses a donor's memory, drain it before maintenance, open it to NBD programs",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "leases",
        help="show who uses a donor's memory",
        description="Lists the leases of a donor, those with the most memory first: of which host, "
        "for which job, user and tenant, how much they hold, how busy they are, and since when. "
        "Job, user and tenant are what the devices say.",
    )
    drain = actions.add_parser(
        "drain",
        help="take back every slab and lend none",
        description="The donor asks every consumer to give up its slabs, and lends none until "
        "`undrain`, even after a restart. Consumers copy their slabs to other donors as far as "
        "those have room; the other pages come from the backups. Interrupting this command does "
        "not end the drain.",
    )
    drain.add_argument("--no-wait", action="store_true", help="return before the last slab is back")
    drain.add_argument(
        "--force",
        action="store_true",
        help="in the end also take slabs that hold the only copies of pages: their devices lose "
        "these pages",
    )
    undrain = actions.add_parser(
        "undrain",
        help="let a drained donor lend again",
        description="Ends a drain: the donor lends again.",
    )
    ticket = actions.add_parser(
        "ticket",
        help="borrow slabs for nbdcopy, nbdinfo, fio and other NBD programs",
        description="Borrows slabs and prints an NBD URI under which programs reach them, until "
        "the command is interrupted or the donor ends the session. Then the connections end and "
        "the slabs go back. Whoever reads the packets of a program that uses the URI can use it "
        "as well, so test on a network that you trust.",
    )
    ticket.add_argument(
        "--slabs", metavar="N", type=_positive, default=1, help="slabs to borrow (default: 1)"
    )
    ticket.add_argument(
        "--connections",
        metavar="N",
        type=_positive,
        default=64,
        help="connections that the URI opens (default: 64); a program may need several at a time",
    )
    listing.add_argument(
        "donor",
        metavar="DONOR",
        nargs="?",
        help="the donor's name or control address (default: the daemon of this host)",
    )
    add_shared(listing, "--config", "--json", "--secret-file")
    for action in (drain, undrain, ticket):
        action.add_argument("donor", metavar="DONOR", help="the donor's name or control address")
        add_shared(action, "--config", "--secret-file")


def run(args: argparse.Namespace) -> int:
    """Lists leases, drains, undrains, or lends to programs; returns when that is done."""
    from infiniswap.control.access import client_config

    config = configuration.load(args.config, {"cluster.secret_file": args.secret_file})
    own = config.daemon.listen
    address = own if args.donor is None else address_of(args.donor, config)
    client = client_config(config, config.cluster.ask_s)
    if args.action == "leases":
        _leases(address, config, client, as_json=args.json)
    elif args.action == "undrain":
        asyncio.run(_undrain(address, client))
    elif args.action == "ticket":
        asyncio.run(_ticket(address, config, client, args.slabs, args.connections))
    else:
        asyncio.run(_drain(address, client, wait=not args.no_wait, force=args.force))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {_COUNT_MAX}")
    return number


# ------------------------------------------------------------------------------- leases


def _leases(
    address: HostPort, config: configuration.Config, client: ClientConfig, *, as_json: bool
) -> None:
    from infiniswap.watch.asking import ask, local_donor

    (row,) = asyncio.run(ask([address], client, local_donor(config)))
    if row.failure is not None:
        raise row.failure
    assert row.status is not None
    if as_json:
        json.dump(leases_json(address, row.status), sys.stdout, indent=2)
        print()
    else:
        _print_leases(address, row.status)


def leases_json(address: HostPort, status: Status) -> dict[str, Any]:
    """The leases of a donor as plain data."""
    listed = leases.of_status(status)
    pool = status.pool
    return {
        "address": str(address),
        "donor_id": status.donor_id,
        "donor_name": status.donor_name,
        "draining": status.draining,
        "slab_bytes": status.slab_bytes,
        "lent_bytes": pool.slabs_mapped * status.slab_bytes,
        "limit_bytes": pool.limit_bytes,
        "can_lend_bytes": pool.can_map * status.slab_bytes,
        "tenants": leases.held_by_tenant(listed),
        "leases": leases.as_json(listed),
        "leases_left_out": status.leases_left_out,
    }


def _print_leases(address: HostPort, status: Status) -> None:
    console = results_console()

    def say(sentence: str) -> None:
        console.print(printable(sentence), markup=False, highlight=False)

    listed = leases.of_status(status)
    name = f"{status.donor_name} ({address})"
    if not listed:
        say(f"Nobody uses memory of {name}.")
        return
    console.print(table(f"leases of {printable(name)}", listed, with_donor=False))
    if leases.is_any_claimed(listed):
        say(leases.CLAIMED_NOTE)
    if status.leases_left_out:
        left_out = counted(status.leases_left_out, "more lease")
        say(f"not listed: {left_out}, with the fewest slabs")
    lent = format_size_short(status.pool.slabs_mapped * status.slab_bytes)
    say(f"lent: {lent} of at most {format_size_short(status.pool.limit_bytes)}")
    tenants = leases.held_by_tenant(listed)
    if len(tenants) > 1:
        each = ", ".join(f"{who} {format_size_short(held)}" for who, held in tenants.items())
        say(f"by tenant (by host where none is told): {each}")
    if status.draining:
        say("The donor drains: it takes every slab back, and lends none.")
    else:
        say(f"To take every slab back before maintenance: infiniswap donor drain {address}")


async def _ticket(
    address: HostPort,
    config: configuration.Config,
    client: ClientConfig,
    slabs: int,
    connections: int,
) -> None:
    from infiniswap.control.client import Identity, QuietHandler, connect
    from infiniswap.control.messages import LeaseUse
    from infiniswap.device.jobs.started_by import started_by

    by = started_by(os.environ, os.getuid())
    use = LeaseUse(tenant=config.device.tenant)
    if config.device.tell_user:
        use = LeaseUse(user=by.user, uid=by.uid, tenant=config.device.tenant)
    identity = Identity(str(uuid.uuid4()), "ticket", host_name(), use)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM as Ctrl-C: the slabs go back at once, not when the donor notices.
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    async with await connect(address, identity, client, QuietHandler()) as session:
        lease = (await session.lease(slabs)).lease
        try:
            for slab in range(slabs):
                await session.map(lease, slab)
            ticket = await session.lasting_ticket(lease, connections)
            _say(f"nbd://{session.data_address.in_uri}/{ticket}")
            ended = await session.wait_ended()
            raise NoDonorError(
                f"the session ended ({ended.detail or ended.reason})", where=f"donor {address}"
            )
        except asyncio.CancelledError:  # interrupted, which is how this ends
            return
        finally:
            if session.ended is None:
                with contextlib.suppress(InfiniswapError):
                    await session.release(lease)


def _say(text: str) -> None:
    print(text, flush=True)


async def _undrain(address: HostPort, client: ClientConfig) -> None:
    from infiniswap.control.client import set_draining

    info = await set_draining(address, client, False)
    _warn(info.warning)
    _say(f"{_named(address, info)} lends again")


def _named(address: HostPort, donor: DrainInfo | Status) -> str:
    """With name and id of the donor that has answered: whoever forwards connections may be the one
    that was named. With certificates the name is that of its certificate."""
    return f"{address} ({donor.donor_name}, {donor.donor_id})"


def _warn(warning: str) -> None:
    if warning:
        print(f"infiniswap: warning: {warning}", file=sys.stderr)


async def _drain(address: HostPort, client: ClientConfig, *, wait: bool, force: bool) -> None:
    from infiniswap.control.client import set_draining

    told = False
    try:
        info = await set_draining(address, client, True, force=force)
        told = True
        _warn(info.warning)
        if wait:
            await _wait_empty(address, client, info, force=force)
        else:
            left = info.slabs_mapped
            lent = f"{counted(left, 'slab')} {'is' if left == 1 else 'are'} still lent"
            _say(f"{_named(address, info)} drains: {lent}")
    except asyncio.CancelledError:
        # Interrupted in the middle of the request: the donor may have received it or not.
        state = "keeps draining" if told else "may have begun to drain"
        print(f"infiniswap: the donor {state}; `undrain` ends the drain", file=sys.stderr)
        raise


async def _wait_empty(
    address: HostPort, client: ClientConfig, info: DrainInfo, *, force: bool = False
) -> None:
    loop = asyncio.get_running_loop()
    slabs = info.slabs_mapped
    with _progress(str(address), slabs) as show:
        fewest, moved_s = slabs, loop.time()
        async for status in _statuses(address, client):
            left = status.pool.slabs_mapped
            if _named(address, status) != _named(address, info):
                raise NoDonorError(
                    f"another donor answers there now: {_named(address, status)}",
                    where=f"donor {address}",
                    mend=f"Look for {info.donor_name} with `infiniswap status`: it keeps draining.",
                )
            if not status.draining:
                raise NoDonorError("another command has ended the drain", where=f"donor {address}")
            # One that was being mapped when the drain began may still appear.
            slabs = max(slabs, left)
            show(slabs - left, slabs)
            if not left:
                break
            if left < fewest:
                fewest, moved_s = left, loop.time()
            elif loop.time() - moved_s > _STUCK_S:
                raise _stuck(address, status, force=force)
    returned = format_size_short(slabs * status.slab_bytes)
    given = f"{counted(slabs, 'slab')} ({returned}) given back"
    _say(f"{_named(address, status)} is drained: {given}; it lends none now")


async def _statuses(address: HostPort, client: ClientConfig) -> AsyncIterator[Status]:
    """Statuses until the caller stops; bridges the restart of a daemon."""
    from infiniswap.control.client import fetch_status

    loop = asyncio.get_running_loop()
    heard_s = loop.time()
    while True:
        try:
            status = await fetch_status(address, client)
        except NoDonorError:
            if loop.time() - heard_s > _STUCK_S:
                raise
        else:
            heard_s = loop.time()
            yield status
        await asyncio.sleep(_POLL_S)


def _stuck(address: HostPort, status: Status, *, force: bool) -> DeadlineError:
    held = [
        f"{lease.slots_mapped} of device {lease.device_name} on {lease.host_name}"
        for lease in status.leases
        if lease.slots_mapped
    ]
    return DeadlineError(
        f"some slabs were not given back within {_STUCK_S:.0f} s: {'; '.join(held)}",
        where=f"donor {address}",
        mend="A device without a backup keeps slabs whose pages are nowhere else: stop it, or give "
        "it a backup. "
        + ("" if force else "With --force these slabs are taken, and their pages are lost. ")
        + "The donor keeps draining; `infiniswap donor undrain` ends the drain.",
    )


@contextlib.contextmanager
def _progress(name: str, slabs: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing into a file."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _slabs: None
        return
    with Progress(
        TextColumn("draining {task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("slabs"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=slabs)
        yield lambda done, total: bar.update(task, completed=done, total=total)
