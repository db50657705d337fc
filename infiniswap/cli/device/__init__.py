# SPDX-License-Identifier: Apache-2.0
"""`infiniswap device`: start, list, show, stop, reload, restart, remove.

`options` makes a specification of what was typed (`infiniswap run` uses it, too), `tables` shows
devices; nobody else enters.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from infiniswap import config as configuration
from infiniswap.cli.common.parser import named
from infiniswap.cli.device.options import (
    add_device_options,
    load_config,
    make_spec,
    prepare_backup_dir,
    started_again,
)
from infiniswap.cli.device.tables import describe, print_json, print_table
from infiniswap.device import frontends
from infiniswap.device.api import Ready
from infiniswap.device.control import client, launch
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import ConflictError, InfiniswapError, UsageError
from infiniswap.system.notify import Notifier
from infiniswap.units import format_size, parse_page_size


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "device",
        help="start, look at and stop devices",
        description="A device is a block device whose pages lie in the memory of donors. Each has "
        "a process of its own.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_start(actions)
    for name, text in (
        ("list", "every device: running, and stopped with its contents kept"),
        ("show", "one device in full"),
        ("stop", "swapoff, detach and end it; the contents are kept"),
        ("reload", "take over what can change while it runs from the configuration"),
        ("restart", "replace its process by one of the code that is installed now"),
        ("remove", "stop it and delete its contents"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
        if name != "list":
            action.add_argument("name", metavar="NAME")
        if name in ("list", "show"):
            action.add_argument("--json", action="store_true", help="for programs")


def _add_start(actions: Any) -> None:
    start = actions.add_parser(
        "start",
        help="start a device",
        description="Starts a device, or one again that was stopped.",
    )
    start.add_argument("name", metavar="NAME")
    start.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    start.add_argument("--size", metavar="SIZE", help="of the device, for example 8G")
    add_device_options(start)
    start.add_argument("--swap", action="store_true", help="use it as swap space")
    start.add_argument(
        "--priority", type=int, metavar="N", help="of the swap area (default: above all others)"
    )
    start.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="where Prometheus may read the metrics (docs/metrics.md; default: nowhere)",
    )
    start.add_argument(
        "--foreground", action="store_true", help="stay in this shell; Ctrl-C stops the device"
    )
    start.add_argument(
        "--discard-contents",
        action="store_true",
        help="begin with zeros, whatever the stopped device of this name held",
    )


def run(args: argparse.Namespace) -> int:
    """Does it."""
    return _ACTIONS[args.action](args)


def _paths(args: argparse.Namespace, config: configuration.Config) -> rundir.DevicePaths:
    return rundir.paths_of(args.name, config.device.run_dir, config.device.backup_dir)


def _running(args: argparse.Namespace) -> rundir.DevicePaths:
    device = load_config(args).device
    return rundir.require_running(args.name, device.run_dir, device.backup_dir)


def _start(args: argparse.Namespace) -> int:
    config = load_config(args)
    paths = _paths(args, config)
    if rundir.is_running(paths):
        raise ConflictError(
            f"a device named {args.name} is running already",
            where=str(paths.run),
            mend=f"Choose another name, or stop it: infiniswap device stop {args.name}.",
        )
    spec = _kept_or_new(args, config, paths)
    prepare_backup_dir(spec, paths)
    ready = launch.start(spec, paths, foreground=args.foreground)
    if args.foreground:
        manager = Notifier()

        def waiting() -> None:
            report_ready(spec, ready)
            manager.ready(f"{format_size(spec.size_bytes)} at {ready.path}")

        return launch.wait(paths, waiting, manager)
    report_ready(spec, ready)
    return 0


def _kept_or_new(
    args: argparse.Namespace, config: configuration.Config, paths: rundir.DevicePaths
) -> DeviceSpec:
    kept = rundir.read_record(paths.kept)
    with named("--size"):
        size_bytes = None if args.size is None else parse_page_size(args.size)
    if kept is not None:
        return started_again(args, config, paths, kept, size_bytes)
    if size_bytes is None:
        raise UsageError(
            f"--size is missing: no stopped device has the name {args.name}",
            mend="Give the size of the new device, for example --size 8G.",
        )
    return make_spec(args, config, name=args.name, size_bytes=size_bytes, swap=args.swap)


def report_ready(spec: DeviceSpec, ready: Ready) -> None:
    """What a user wants to know of a new device."""
    swap = ", swapping" if spec.swap else ""
    print(
        f"device {spec.name}: {format_size(spec.size_bytes)} at {ready.path} "
        f"(front end {ready.frontend}: {ready.why}){swap}"
    )
    for warning in ready.warnings:
        print(f"infiniswap: warning: {warning}", file=sys.stderr)


def _list(args: argparse.Namespace) -> int:
    config = load_config(args)
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    running, silent = [], []
    for name in rundir.running_names(run_dir):
        try:
            running.append(client.status(rundir.paths_of(name, run_dir, backup_dir)))
        except ConflictError:
            silent.append(name)  # starting or stopping at this moment, or hanging
    stopped = rundir.stopped_names(run_dir, backup_dir)
    died = rundir.died_names(run_dir)
    lost = [name for name in stopped if _is_lost(rundir.paths_of(name, run_dir, backup_dir))]
    if args.json:
        print_json(
            {
                "running": running,
                "silent": silent,
                "stopped": stopped,
                "died": died,
                "lost": lost,
            }
        )
        return 0
    states = dict.fromkeys(stopped, "stopped")
    states |= dict.fromkeys(lost, "contents lost")
    states |= dict.fromkeys(died, "died")
    states |= dict.fromkeys(silent, "no answer")
    print_table(running, states)
    for note in rundir.unseen(run_dir, backup_dir):
        print(f"infiniswap: note: {note}", file=sys.stderr)
    return 0


def _is_lost(paths: rundir.DevicePaths) -> bool:
    try:
        kept = rundir.read_record(paths.kept)
    except InfiniswapError:
        return True  # a damaged record: `start` says how to mend it
    return kept is not None and contents.are_lost(paths, kept)


def _show(args: argparse.Namespace) -> int:
    paths = _running(args)
    status = client.status(paths)
    if args.json:
        print_json(status)
        return 0
    for label, value in describe(status):
        print(f"{label + ':':<16}{value}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    paths = _running(args)
    client.stop(paths, remove=False)
    print(f"device {args.name}: stopped")
    return 0


def _reload(args: argparse.Namespace) -> int:
    paths = _running(args)
    answer = client.reload(paths)
    print(f"device {args.name}: reloaded: {', '.join(answer.applied) or 'nothing has changed'}")
    if answer.waiting:
        print(
            f"infiniswap: these keys wait for a stop and a start: {', '.join(answer.waiting)}",
            file=sys.stderr,
        )
    return 0


def _restart(args: argparse.Namespace) -> int:
    paths = _running(args)
    before = client.status(paths)
    if before.succession is None:
        return _stop_and_start(args, load_config(args), paths)
    after = client.restart(paths)
    assert after.succession is not None
    print(
        f"device {args.name}: restarted, process {before.pid} → {after.pid}, pause "
        f"{after.succession.pause_ms:.0f} ms"
    )
    return 0


def _stop_and_start(
    args: argparse.Namespace, config: configuration.Config, paths: rundir.DevicePaths
) -> int:
    """For a device without a standby."""
    spec = rundir.read_record(paths.record)
    if spec is None or spec.ephemeral:
        raise ConflictError(
            "this device belongs to an `infiniswap run`, which would lose its memory, as it has "
            "no standby",
            where=f"device {args.name}",
        )
    client.stop(paths, remove=False)
    kept = rundir.read_record(paths.kept)
    assert kept is not None  # or it would have refused to stop
    again = started_again(
        argparse.Namespace(**_NO_FLAGS, config=args.config), config, paths, kept, None
    )
    report_ready(again, launch.start(again, paths))
    return 0


def _remove(args: argparse.Namespace) -> int:
    config = load_config(args)
    paths = _paths(args, config)
    if rundir.is_running(paths):
        client.stop(paths, remove=True)
    else:
        spec = rundir.read_record(paths.kept) or rundir.read_record(paths.record)
        if spec is None and not paths.run.exists():
            rundir.require_running(args.name, config.device.run_dir, config.device.backup_dir)
        else:
            _remove_stopped(paths, spec)
    print(f"device {args.name}: removed")
    return 0


def _remove_stopped(paths: rundir.DevicePaths, spec: DeviceSpec | None) -> None:
    """Without a spec: a device whose process died when it had just begun to start."""
    lock = rundir.take_lock(paths)
    try:
        frontends.clear_leftovers(paths)
        if spec is not None:
            contents.delete(paths, spec)
        rundir.clear(paths)
    finally:
        os.close(lock)


_NO_FLAGS = dict.fromkeys(
    ("backup", "discard_contents", "frontend", "priority", "slab", "staging", "swap", "transport")
)

_ACTIONS = {
    "start": _start,
    "list": _list,
    "show": _show,
    "stop": _stop,
    "reload": _reload,
    "restart": _restart,
    "remove": _remove,
}
