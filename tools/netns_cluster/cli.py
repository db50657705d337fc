# SPDX-License-Identifier: Apache-2.0
"""The command `tools/netns-cluster`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from infiniswap.cli.main import report
from infiniswap.errors import InfiniswapError, UnavailableError, UsageError, from_oserror
from infiniswap.units import format_size, format_size_short, parse_size
from netns_cluster import cluster as clusters
from netns_cluster import record
from netns_cluster.cluster import Cluster, HostState
from netns_cluster.plan import HostPlan, Plan
from netns_cluster.record import Process

PROGRAM = "tools/netns-cluster"
_INTERRUPTED = 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EPILOG = """
The hosts are h1, h2, ... All verbs may be repeated. How to try a cluster: docs/cluster.md.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog, mend=f"See `{self.prog} --help`.")


def build_parser() -> argparse.ArgumentParser:
    """Verbs and options."""
    parser = _Parser(
        prog=PROGRAM,
        description="A cluster on this one machine: each host is a network namespace and a memory "
        "cgroup, with a daemon of its own.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        one.add_argument(
            "--name",
            default=record.DEFAULT_NAME,
            help=f"of the cluster ({record.DEFAULT_NAME}); several can be up",
        )
        return one

    _add_up(verb("up", "make a cluster, and take it down again on Ctrl-C"))
    verb("down", "take it down; also what a killed command has left")
    status = verb("status", "hosts, links, memory and slabs")
    status.add_argument("--json", action="store_true", help="print JSON")
    run = verb("exec", "run a command on a host")
    run.add_argument(
        "--no-cgroup",
        action="store_true",
        help="outside the host's memory; always so for the command infiniswap, as what serves a "
        "device must never wait for that device",
    )
    run.add_argument("host", metavar="HOST")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="[--] COMMAND...")
    for name, text in (
        ("cut", "pull a host's cable: its packets vanish"),
        ("heal", "make its cable as it was: neither cut nor slow"),
        ("freeze", "stop its daemon in its tracks (SIGSTOP)"),
        ("thaw", "let the daemon go on"),
        ("kill", "kill its daemon (SIGKILL)"),
        ("restart", "start its daemon again, a living one after it has ended in order"),
        ("release", "give back what squeeze took"),
    ):
        verb(name, text).add_argument("host", metavar="HOST")
    delay = verb("delay", "hold every packet of a host back, in either direction; 0ms: no longer")
    delay.add_argument("host", metavar="HOST")
    delay.add_argument("delay", metavar="TIME", help="for example 20ms")
    squeeze = verb("squeeze", "take that much of a host's memory, as its applications would")
    squeeze.add_argument("host", metavar="HOST")
    squeeze.add_argument("size", metavar="SIZE")
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="how many (3)")
    for name, default, text in (
        ("--memory", "512M", "memory of a host (512M)"),
        ("--pool", "auto", "most memory it lends (auto: what its headroom leaves)"),
        ("--link", "", "speed of its cable, such as 1gbit (default: no limit)"),
    ):
        parser.add_argument(
            name,
            action="append",
            default=[default],
            metavar="[HOST=]VALUE",
            help=text + "; again with HOST= for one host",
        )
    parser.add_argument("--headroom", default="auto", metavar="SIZE", help="an eighth of it (auto)")
    parser.add_argument("--slab", default="16M", metavar="SIZE", help="unit of lending (16M)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any other key of the configuration, for all hosts",
    )
    parser.add_argument(
        "--detach", action="store_true", help="return; the cluster stays until `down`"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        clusters.check_machine()
        if args.verb == "up":
            return _up(args)
        if args.verb == "down":
            return _down(args)
        if args.verb == "status":
            return _status(args)
        if args.verb == "exec":
            return _exec(args)
        return _operate(args)
    except InfiniswapError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED


# ------------------------------------------------------------------------------- up


def parse_delay_ms(text: str) -> float:
    """Milliseconds from "20ms", "1.5s" or "20".

    Raises:
        UsageError: not a delay.
    """
    for unit, factor in (("ms", 1.0), ("s", 1000.0), ("", 1.0)):
        number = text.removesuffix(unit)
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return float(number) * factor
    raise UsageError(f"{text!r} is no delay: for example 20ms")


def parse_setting(text: str) -> tuple[str, str]:
    """Key and TOML value from "policy.period_s=0.2"; what is no number is a string.

    Raises:
        UsageError: not a setting.
    """
    key, equals, value = text.partition("=")
    if not equals or key.count(".") != 1:
        raise UsageError(f"{text!r} is no setting: for example policy.period_s=0.5")
    if not value.replace(".", "", 1).isdecimal() and value not in ("true", "false"):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return key, value


def _of_host(values: list[str], number: int, count: int) -> str:
    """The last value that is for this host: "V" or "hN=V"."""
    found = values[0]
    for value in values[1:]:
        host, equals, rest = value.partition("=")
        if equals and not (re.fullmatch(r"h[1-9]\d*", host) and int(host[1:]) <= count):
            raise UsageError(f"{value!r}: the hosts are h1 to h{count}")
        if not equals or host == f"h{number}":
            found = rest if equals else value
    return found


def _plan(args: argparse.Namespace) -> Plan:
    hosts = tuple(
        HostPlan(
            parse_size(_of_host(args.memory, number, args.hosts)),
            _of_host(args.pool, number, args.hosts),
            _of_host(args.link, number, args.hosts),
        )
        for number in range(1, args.hosts + 1)
    )
    return Plan(
        args.name,
        hosts,
        parse_size(args.slab),
        args.headroom,
        dict(parse_setting(text) for text in args.set),
        args.detach,
    )


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An ending signal interrupts what is done the first time, and nothing afterwards: taking
    down is bounded, and half of it helps nobody."""
    ending = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if not ending.is_set():
            ending.set()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in _ENDING}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _up(args: argparse.Namespace) -> int:
    plan = _plan(args)
    with _signals():
        cluster = clusters.up(plan)
        try:
            print(_table(cluster.states()))
            print(_how_to_go_on(cluster), flush=True)
            if plan.keep:
                return 0
            clusters.wait_gone(plan.name, Process.of(os.getpid()))
            print(f"cluster {plan.name} has been taken down")
            return 0
        except KeyboardInterrupt:
            print(f"\ntaking the cluster {plan.name} down", flush=True)
            clusters.down(plan.name)
            return 0
        except BaseException:
            clusters.down(plan.name)
            raise


def _how_to_go_on(cluster: Cluster) -> str:
    whole = cluster.record
    option = "" if cluster.name == record.DEFAULT_NAME else f"--name {cluster.name} "
    last = whole.hosts[-1].name
    lines = [
        "",
        f"slabs of {format_size(whole.slab_bytes)}, secret {cluster.secret_file}, logs "
        f"{record.state_directory(cluster.name)}/HOST/daemon.log. To go on:",
        "",
        f"  {PROGRAM} exec {option}h1 -- infiniswap status",
        f"  {PROGRAM} exec {option}h1 -- infiniswap run --local 64M -- COMMAND...",
        f"  {PROGRAM} cut {option}{last}; {PROGRAM} heal {option}{last}",
        f"  {PROGRAM} squeeze {option}{last} 200M; {PROGRAM} status {option}".rstrip(),
        f"  {PROGRAM} down {option}".rstrip() + ("" if whole.keeper is None else "   (or Ctrl-C)"),
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------------- others


def _down(args: argparse.Namespace) -> int:
    there = clusters.down(args.name)
    print(f"cluster {args.name}: " + ("taken down" if there else "nothing was there"))
    return 0


def _status(args: argparse.Namespace) -> int:
    states = Cluster(args.name).states()
    print(as_json(states).decode() if args.json else _table(states))
    return 0


def _operate(args: argparse.Namespace) -> int:
    cluster = Cluster(args.name)
    simple: dict[str, Callable[[str], None]] = {
        "cut": cluster.cut,
        "heal": cluster.heal,
        "freeze": cluster.freeze,
        "thaw": cluster.thaw,
        "kill": cluster.kill,
        "restart": cluster.restart,
        "release": cluster.release,
    }
    if args.verb == "delay":
        cluster.delay(args.host, parse_delay_ms(args.delay))
    elif args.verb == "squeeze":
        cluster.squeeze(args.host, parse_size(args.size))
    else:
        simple[args.verb](args.host)
    return 0


def is_infiniswap(argv: Sequence[str]) -> bool:
    """Whether it is a command that may start a device process, which inherits its cgroups."""
    words = [Path(argv[0]).name, *argv[1:3]]
    return words[0] == "infiniswap" or words[1:] == ["-m", "infiniswap"]


def _exec(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise UsageError("there is no command to run", where=f"{PROGRAM} exec")
    cluster = Cluster(args.name)
    cgroup = not args.no_cgroup and not is_infiniswap(argv)
    command = cluster.command(args.host, argv, cgroup=cgroup)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, cluster.environment(args.host))
    except FileNotFoundError as error:
        raise UnavailableError(f"the command `{command[0]}` is not installed") from error
    except OSError as error:
        raise from_oserror(f"cannot run `{command[0]}`", error) from error


# ----------------------------------------------------------------------------- table


def as_json(states: list[HostState]) -> bytes:
    """For programs."""
    return msgspec.json.format(
        msgspec.json.encode(
            [
                {
                    "name": one.host.name,
                    "address": one.host.address,
                    "daemon": one.daemon,
                    "cut": one.host.cut,
                    "delay_ms": one.host.delay_ms,
                    "link": one.host.link,
                    "memory_bytes": one.host.memory_bytes,
                    "available_bytes": one.memory.available_bytes,
                    "squeeze_bytes": one.host.squeeze_bytes,
                    "pool": one.status.pool if one.status else None,
                }
                for one in states
            ]
        )
    )


def _link(one: HostState) -> str:
    host = one.host
    parts = [host.link] if host.link else []
    if host.delay_ms:
        dead = host.relay is None or not host.relay.state
        parts.append(f"+{host.delay_ms:g}ms" + (" (relay dead)" if dead else ""))
    if host.cut:
        parts.append("cut")
    return " ".join(parts) or "up"


def _squeezed(host: record.Host) -> str:
    if host.squeezer is None:
        return "-"
    return format_size_short(host.squeeze_bytes) if host.squeezer.state else "ended"


def _table(states: list[HostState]) -> str:
    rows = [
        ("host", "address", "daemon", "link", "memory", "available", "squeezed", "lent", "free")
    ]
    for one in states:
        pool = one.status.pool if one.status else None
        rows.append(
            (
                one.host.name,
                one.host.address,
                one.daemon,
                _link(one),
                format_size_short(one.host.memory_bytes),
                format_size_short(one.memory.available_bytes or 0),
                _squeezed(one.host),
                str(pool.slabs_mapped) if pool else "?",
                str(pool.slabs_free) if pool else "?",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
