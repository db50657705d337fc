# SPDX-License-Identifier: Apache-2.0
"""`infiniswap device`: start, list, show, stop, reload, restart, remove.

`options` makes a specification of the command line (`infiniswap run` uses it as well), `tables`
prints devices. No other module enters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

import msgspec

from infiniswap import code_versions
from infiniswap import config as configuration
from infiniswap.cli.common.parser import add_shared, named
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
from infiniswap.device.control.frozen import FrozenError
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.spec import DeviceSpec, check_files
from infiniswap.errors import ConflictError, InfiniswapError, UsageError
from infiniswap.system.notify import Notifier
from infiniswap.units import format_size, parse_page_size


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "device",
        help="start, show and stop devices",
        description="Starts, shows and stops devices. A device is a block device whose pages lie "
        "in the memory of donors; each has a process of its own.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_start(actions)
    for name, text in (
        ("list", "list every device: running ones, and stopped ones with their contents kept"),
        ("show", "show one device in full"),
        ("stop", "stop a device (swapoff, detach) and keep its contents"),
        ("reload", "apply changed configuration keys to a running device"),
        ("restart", "replace a device's process by one that runs the code installed now"),
        ("remove", "stop a device and delete its contents"),
    ):
        description = f"{text[0].upper()}{text[1:]}."
        action = actions.add_parser(name, help=text, description=description)
        add_shared(action, "--config")
        if name != "list":
            action.add_argument("name", metavar="NAME")
        if name in ("list", "show"):
            add_shared(action, "--json")


def _add_start(actions: Any) -> None:
    start = actions.add_parser(
        "start",
        help="start a device",
        description="Starts a new device, or restarts a stopped one.",
    )
    start.add_argument("name", metavar="NAME")
    add_shared(start, "--config")
    start.add_argument("--size", metavar="SIZE", help="size of a new device, for example 8G")
    add_device_options(start)
    start.add_argument("--swap", action="store_true", help="use the device as swap space")
    start.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="priority of the swap area (default: above every other area)",
    )
    start.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="address at which Prometheus reads the metrics (default: none)",
    )
    start.add_argument(
        "--foreground",
        action="store_true",
        help="keep running in this shell; Ctrl-C stops the device",
    )
    start.add_argument(
        "--discard-contents",
        action="store_true",
        help="start with zeros and drop the contents kept by a stopped device of this name",
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
    kept = rundir.read_kept(paths)
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
    """Prints where a new device is, and its warnings."""
    swap = ", swapping" if spec.swap else ""
    print(
        f"device {spec.name}: {format_size(spec.size_bytes)} at {ready.path} "
        f"(front end {ready.frontend}: {ready.why}){swap}"
    )
    for warning in [*ready.warnings, *ready.degraded]:
        print(f"infiniswap: warning: {warning}", file=sys.stderr)


def _list(args: argparse.Namespace) -> int:
    config = load_config(args)
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    running, silent, frozen = [], [], []
    for name in rundir.running_names(run_dir):
        try:
            running.append(client.status(rundir.paths_of(name, run_dir, backup_dir)))
        except FrozenError:
            frozen.append(name)
        except ConflictError:
            silent.append(name)  # it is starting, stopping, or hangs
    stopped = rundir.stopped_names(run_dir, backup_dir)
    died = rundir.died_names(run_dir)
    doubts = {
        name: doubt.state
        for name in {*stopped, *died}
        if (doubt := rundir.why_not_believed(rundir.paths_of(name, run_dir, backup_dir)))
    }
    stopped, died = ([name for name in names if name not in doubts] for names in (stopped, died))
    lost = [name for name in stopped if _is_lost(rundir.paths_of(name, run_dir, backup_dir))]
    if args.json:
        print_json(
            {
                "running": running,
                "silent": silent,
                "frozen": frozen,
                "stopped": stopped,
                "died": died,
                "lost": lost,
                "not_believed": doubts,
            }
        )
        return 0
    states = dict.fromkeys(stopped, "stopped")
    states |= dict.fromkeys(lost, "contents lost")
    states |= dict.fromkeys(died, "died")
    states |= dict.fromkeys(silent, "no answer")
    states |= dict.fromkeys(frozen, "frozen")
    states |= doubts
    print_table(running, states)
    for note in rundir.unseen(run_dir, backup_dir):
        print(f"infiniswap: note: {note}", file=sys.stderr)
    return 0


def _is_lost(paths: rundir.DevicePaths) -> bool:
    try:
        kept = rundir.read_kept(paths)
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


def _sweep() -> None:
    """Removes earlier code of the Debian package that this device was the last to need."""
    if os.geteuid() == 0 and (top := code_versions.packaged_in()) is not None:
        with contextlib.suppress(InfiniswapError):  # the next upgrade tries again
            code_versions.sweep(top)


def _stop(args: argparse.Namespace) -> int:
    paths = _running(args)
    client.stop(paths, remove=False)
    _sweep()
    print(f"device {args.name}: stopped")
    return 0


def _reload(args: argparse.Namespace) -> int:
    paths = _running(args)
    answer = client.reload(paths)
    changes = answer.changes or ", ".join(answer.applied) or "nothing has changed"
    print(f"device {args.name}: reloaded: {changes}")
    if answer.waiting:
        print(
            f"infiniswap: these keys take effect after a stop and a start: "
            f"{', '.join(answer.waiting)}",
            file=sys.stderr,
        )
    return 0


def _restart(args: argparse.Namespace) -> int:
    paths = _running(args)
    before = client.status(paths)
    if before.succession is None:
        return _stop_and_start(args, load_config(args), paths)
    spec = rundir.read_record(paths)
    if spec is not None:  # it may be of a release that has made none
        launch.keep_certificate(spec)
    after = client.restart(paths)
    _sweep()
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
    spec = rundir.read_record(paths)
    if spec is None or spec.ephemeral:
        raise ConflictError(
            "this device belongs to an `infiniswap run`, whose job would lose its memory: the "
            "device has no standby",
            where=f"device {args.name}",
        )
    # A device that could not start again must not be stopped.
    check_files(config)
    launch.keep_certificate(msgspec.structs.replace(spec, config=config))
    client.stop(paths, remove=False)
    kept = rundir.read_kept(paths)
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
        spec = rundir.read_kept(paths) or rundir.read_record(paths)
        if spec is None and not paths.run.exists():
            rundir.require_running(args.name, config.device.run_dir, config.device.backup_dir)
        else:
            _remove_stopped(paths, spec)
    print(f"device {args.name}: removed")
    return 0


def _remove_stopped(paths: rundir.DevicePaths, spec: DeviceSpec | None) -> None:
    """Without a spec: the device's process died before it had written one."""
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
