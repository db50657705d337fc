# SPDX-License-Identifier: Apache-2.0
"""`infiniswap daemon`: lends this host's idle memory."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from infiniswap import config as configuration
from infiniswap import rights
from infiniswap.cli.common.parser import add_shared
from infiniswap.errors import ConflictError, InfiniswapError, NotPermittedError, UsageError
from infiniswap.secret import check_listen_secret
from infiniswap.units import CONTROL_PORT, MIB, format_size_short, parse_host_port

_AFTER_S_MAX = 86_400
_GRACE = "grace"
"""The value of --after that stands for daemon.lease_grace_s."""
_LOOK_S = 0.1
_MEMORY_BYTES = 256 * MIB
"""What a daemon maps beside its slabs; half of it has been seen."""


def add_parser(subparsers: Any) -> None:
    """Adds the parser of `daemon`."""
    parser = subparsers.add_parser(
        "daemon",
        help="lend this host's idle memory",
        description="Lends this host's idle memory to consumers. Listens on loopback by default; "
        "any other address needs a cluster secret ([cluster] secret_file).",
    )
    add_shared(parser, "--config", "--secret-file")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"address of the control API (default 127.0.0.1:{CONTROL_PORT})",
    )
    parser.add_argument(
        "--data-port",
        metavar="PORT",
        help="port for pages (default: the control port + 1; 0 takes any free port)",
    )
    parser.add_argument(
        "--pool",
        metavar="SIZE|auto",
        help="upper limit of the memory lent (default auto: all above the headroom)",
    )
    parser.add_argument(
        "--headroom", metavar="SIZE|auto", help="memory kept free for programs of this host"
    )
    parser.add_argument(
        "--slab", metavar="SIZE", help="size of a slab, the same on every host (default 1G)"
    )
    parser.add_argument(
        "--peers", metavar="H:P,...", help="other donors, which `status` shows as well"
    )
    parser.add_argument("--name", metavar="NAME", help="name of this donor in tables")
    parser.add_argument(
        "--memory-cgroup",
        type=Path,
        metavar="PATH",
        help="measure the memory of this cgroup instead of the whole host",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="write the ports to this file as JSON while the daemon serves",
    )
    _add_ways(parser)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """Options for what is not simply a daemon."""
    parser.add_argument(
        "--release",
        action="store_true",
        help="start no daemon; give back the memory left behind by stopped daemons",
    )
    parser.add_argument(
        "--after",
        type=_after,
        metavar="SECONDS|grace",
        help="with --release: first give a new daemon this long to take the memory over, unless "
        "half of the headroom is used up; `grace` is daemon.lease_grace_s",
    )
    parser.add_argument(
        "--donor", metavar="ID", help="with --release: only the memory of this donor"
    )
    parser.add_argument(
        "--prepare",
        metavar="USER",
        help="start no daemon; as root, make what a daemon of this user needs and may not make: "
        "the tmpfs of the slabs, and the copies that --copies asks for",
    )
    parser.add_argument(
        "--copies",
        type=Path,
        metavar="DIR",
        help="read copies in this directory in place of the files that the configuration names; "
        "with --prepare: write them",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also log each slab that is mapped or given back"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the daemon until SIGTERM or SIGINT."""
    import asyncio
    import logging

    if args.release:
        return release(args)
    if args.after is not None or args.donor is not None:
        raise UsageError("--after and --donor need --release")
    if args.prepare is not None:
        return prepare(args)
    from infiniswap import logs
    from infiniswap.control.listening import check_reach
    from infiniswap.donor import by_hand, copies, daemon
    from infiniswap.donor.memory import memory_source
    from infiniswap.system.notify import Notifier
    from infiniswap.system.surroundings import leave
    from infiniswap.system.surroundings.limits import check_ulimits

    def load() -> configuration.Config:
        return copies.use(configuration.load(args.config, overrides(args)), args.copies)

    config = load()
    # With --memory-cgroup it is where it has to be.
    stays = Notifier().managed or args.memory_cgroup is not None
    leave.settle(os.getpid(), f"infiniswapd-{os.getpid()}", managed=stays)
    slab_bytes = config.daemon.slab_bytes
    check_ulimits(
        file_bytes=0 if config.daemon.run_dir is None else slab_bytes,
        memory_bytes=_MEMORY_BYTES + slab_bytes,
    )
    from infiniswap.engine.native import NativeStore

    # All that can refuse it, before anything is mounted.
    check_listen_secret(config.daemon.listen, config.cluster.trust_file)
    check_reach(config.daemon.listen)
    config.keys()
    config.second_keys()
    memory = memory_source(args.memory_cgroup)
    logs.set_up(
        "infiniswapd",
        logging.DEBUG if args.verbose else logging.INFO,
        to_journal=logs.is_journal(),
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    with by_hand.bounded(config, memory, args.memory_cgroup) as give_back:
        asyncio.run(daemon.run(config, NativeStore, memory, args.ready_file, load, give_back))
    return 0


def release(args: argparse.Namespace) -> int:
    """Gives back the memory left behind by stopped daemons.

    Raises:
        UsageError: --after is out of range.
        NotPermittedError: the memory belongs to another user.
        ConflictError: with --after, devices of protocol version 1 have slabs there.
    """
    if args.after not in (None, _GRACE) and not 0 <= args.after <= _AFTER_S_MAX:
        raise UsageError(
            f"--after {args.after:g} is out of range",
            mend=f"It is 0 to {_AFTER_S_MAX} (seconds).",
        )
    from infiniswap.donor import home

    config = configuration.load(args.config, {"daemon.headroom": args.headroom})
    run_dir = config.daemon.run_dir
    # Of other daemons this user need not know.
    homes = [] if run_dir is None else [run_dir, *run_dir.glob(f"{args.donor or '*'}/")]
    for closed in filter(None, map(rights.closed_directory, homes)):
        raise NotPermittedError(
            "this user may not look for memory there", where=str(closed), mend="Run it with sudo."
        )
    found = [] if run_dir is None else home.leftovers(run_dir)
    if args.donor is not None:
        found = [leftover for leftover in found if leftover.path.name == args.donor]
    if found and args.after is not None:
        after_s = config.daemon.lease_grace_s if args.after == _GRACE else args.after
        _wait(config, after_s, args)
    kept: ConflictError | None = None
    for leftover in found:
        try:
            if home.release(leftover, asked=args.after is None):
                print(f"{leftover.path}: {format_size_short(leftover.used_bytes)} given back")
        except ConflictError as error:
            kept = error
    if run_dir is not None:
        from infiniswap.control.local import remove_stale

        remove_stale(run_dir)
        with contextlib.suppress(OSError):  # others have something there
            run_dir.rmdir()
    if kept is not None:
        raise kept
    return 0


def _after(text: str) -> float | str:
    """Parses the value of --after: seconds, or the word.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if text == _GRACE:
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _wait(config: configuration.Config, after_s: float, args: argparse.Namespace) -> None:
    """Until a successor has had its time, or the host needs the memory."""
    import time

    from infiniswap.donor.memory import memory_source
    from infiniswap.donor.pool_limits import headroom_bytes
    from infiniswap.policy.headroom import URGENT_FRACTION

    memory = memory_source(args.memory_cgroup)
    end_s = time.monotonic() + after_s
    while (left_s := end_s - time.monotonic()) > 0:
        with contextlib.suppress(InfiniswapError):
            figures = memory.read()
            if figures.available_bytes < URGENT_FRACTION * headroom_bytes(config, figures):
                return
        time.sleep(min(left_s, _LOOK_S))


def prepare(args: argparse.Namespace) -> int:
    """Makes what root has to make for a daemon of another user.

    Raises:
        NotPermittedError: we are not root.
        InfiniswapError: something cannot be made.
    """
    import logging

    from infiniswap import logs
    from infiniswap.donor import starter
    from infiniswap.donor.memory import memory_source

    if os.geteuid() != 0:
        raise NotPermittedError("--prepare needs root", mend="Run it with sudo.")
    logs.set_up("infiniswapd", logging.INFO, to_journal=logs.is_journal())
    config = configuration.load(args.config, overrides(args))
    user = starter.daemon_user(args.prepare)
    starter.prepare(config, user, memory_source(args.memory_cgroup), args.copies)
    return 0


def overrides(args: argparse.Namespace) -> dict[str, object]:
    """The flags as configuration keys.

    Raises:
        UsageError: --listen is no address.
    """
    data_port = args.data_port
    if args.listen is not None and data_port is None:
        listen = parse_host_port(args.listen)
        if listen.port == 65_535:
            raise UsageError(
                "no port follows the control port", where="--listen", mend="Give --data-port."
            )
        data_port = listen.port + 1 if listen.port else 0
    return {
        "daemon.listen": args.listen,
        "daemon.data_port": data_port,
        "daemon.pool": args.pool,
        "daemon.headroom": args.headroom,
        "daemon.slab": args.slab,
        "daemon.name": args.name,
        "cluster.peers": args.peers,
        "cluster.secret_file": args.secret_file,
    }
