# SPDX-License-Identifier: Apache-2.0
"""`infiniswap device`: start, list, show, stop, restart, remove."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infiniswap import config as configuration
from infiniswap.cli.parser import named
from infiniswap.device import frontends
from infiniswap.device.api import DeviceStatus, Ready, SuccessionRow
from infiniswap.device.control import client, launch
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.spec import (
    DeviceSpec,
    check_backup_choice,
    check_files,
    check_name,
    check_size,
    completed,
    source_fields,
    with_own_values,
)
from infiniswap.discovery.static import only_these
from infiniswap.errors import ConflictError, InfiniswapError, NotPermittedError, UsageError
from infiniswap.system.notify import Notifier
from infiniswap.units import format_size, format_size_short, parse_host_ports, parse_page_size


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "device",
        help="start, look at and stop devices",
        description="A device is a block device whose pages lie in the memory of donors. Each has "
        "a process of its own.",
        allow_abbrev=False,
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
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
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
        allow_abbrev=False,
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


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Options that `run` has, too."""
    parser.add_argument("--donors", metavar="H[:P],...", help="control addresses of the donors")
    parser.add_argument(
        "--frontend",
        choices=("auto", "ublk", "nbd", "fuse", "nbd-socket"),
        help="how the kernel sees it (default: the first that works)",
    )
    parser.add_argument(
        "--backup",
        metavar="PATH|none",
        help="local copy of all pages: a file or block device (default: a file of the device's "
        "name in the backup directory)",
    )
    parser.add_argument(
        "--allow-data-loss", action="store_true", help="confirms --backup none with swap"
    )
    parser.add_argument("--transport", choices=("auto", "rdma", "tcp"), help="how pages travel")
    parser.add_argument("--secret-file", metavar="FILE", help="the cluster secret (mode 0600)")
    parser.add_argument("--slab", metavar="SIZE", help="slab size, as on the donors (default 1G)")
    parser.add_argument("--staging", metavar="SIZE", help="buffers for pages on their way (64M)")


def load_config(args: argparse.Namespace) -> configuration.Config:
    """Configuration with the flags of add_device_options on top."""
    return configuration.load(getattr(args, "config", None), _overrides(args))


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    donors = getattr(args, "donors", None)
    return {
        "device.frontend": getattr(args, "frontend", None),
        "device.transport": getattr(args, "transport", None),
        "device.slab": getattr(args, "slab", None),
        "device.staging": getattr(args, "staging", None),
        "device.metrics_listen": getattr(args, "metrics_listen", None),
        "cluster.secret_file": getattr(args, "secret_file", None),
        **only_these(None if donors is None else parse_host_ports(donors)),
    }


def make_spec(
    args: argparse.Namespace,
    config: configuration.Config,
    *,
    name: str,
    size_bytes: int,
    swap: bool,
    ephemeral: bool = False,
    owner_pid: int | None = None,
) -> DeviceSpec:
    """A spec from flags and configuration.

    Raises:
        UsageError: they do not go together.
    """
    paths = rundir.paths_of(name, config.device.run_dir, config.device.backup_dir)
    check_size(size_bytes, config.device.slab_bytes)
    backup = backup_path(args.backup, paths)
    check_backup_choice(backup, swap, args.allow_data_loss)
    priority = checked_priority(getattr(args, "priority", None))
    check_files(config)
    spec = DeviceSpec(
        name=check_name(name),
        device_id=str(uuid.uuid4()),
        size_bytes=size_bytes,
        config=config,
        backup=backup,
        backup_owned=args.backup is None or (backup is not None and not os.path.exists(backup)),
        swap=swap,
        ephemeral=ephemeral,
        owner_pid=owner_pid,
        discard_contents=getattr(args, "discard_contents", False),
        **source_fields(getattr(args, "config", None), _overrides(args)),
    )
    return spec if priority is None else with_own_values(spec, priority=priority)


def run(args: argparse.Namespace) -> int:
    """Does it."""
    return _ACTIONS[args.action](args)


def _paths(args: argparse.Namespace, config: configuration.Config) -> rundir.DevicePaths:
    return rundir.paths_of(args.name, config.device.run_dir, config.device.backup_dir)


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
        return _again(args, config, paths, kept, size_bytes)
    if size_bytes is None:
        raise UsageError(
            f"--size is missing: no stopped device has the name {args.name}",
            mend="Give the size of the new device, for example --size 8G.",
        )
    return make_spec(args, config, name=args.name, size_bytes=size_bytes, swap=args.swap)


def _again(
    args: argparse.Namespace,
    config: configuration.Config,
    paths: rundir.DevicePaths,
    kept: DeviceSpec,
    size_bytes: int | None,
) -> DeviceSpec:
    """The spec of a stopped device; flags may change what its contents do not depend on.

    Raises:
        ConflictError: they would change more.
    """
    import msgspec

    mend = (
        "Leave that out to start it as it was, or delete it first: infiniswap device remove "
        f"{kept.name}."
    )
    stopped = f"the stopped device {kept.name}"
    if size_bytes is not None and size_bytes != kept.size_bytes:
        raise ConflictError(
            f"{stopped} has {format_size(kept.size_bytes)}, not {format_size(size_bytes)}",
            where=str(paths.kept),
            mend=mend,
        )
    if args.swap and not kept.swap:
        raise ConflictError(
            f"{stopped} is no swap space; --swap would overwrite its contents",
            where=str(paths.kept),
            mend=mend,
        )
    if args.backup is not None and backup_path(args.backup, paths) != kept.backup:
        raise ConflictError(
            f"the backup of {stopped} is {kept.backup or 'none'}", where=str(paths.kept), mend=mend
        )
    check_files(config)
    priority = checked_priority(args.priority)
    source = source_fields(args.config, _overrides(args))
    again = msgspec.structs.replace(
        kept,
        config=completed(config, kept.config),
        discard_contents=bool(args.discard_contents),
        config_file=source["config_file"],
        flags={**kept.flags, **source["flags"]},
    )
    given = {
        "slab_bytes": args.slab,
        "frontend": args.frontend,
        "transport": args.transport,
        "staging_bytes": args.staging,
    }
    own = {key: getattr(kept.config.device, key) for key in given if given[key] is None}
    own["priority"] = kept.config.device.priority if priority is None else priority
    return with_own_values(again, **own)


def backup_path(argument: str | None, paths: rundir.DevicePaths) -> str | None:
    """What --backup means: a path, None for `none`, the default file when it was not given."""
    if argument == "none":
        return None
    return os.path.abspath(argument) if argument else str(paths.backup)


def checked_priority(priority: int | None) -> int | None:
    """Raises UsageError for a priority that no swap area can have."""
    if priority is not None and not 0 <= priority <= 32_767:
        raise UsageError(f"--priority {priority} is out of range", mend="It is 0 to 32767.")
    return priority


def prepare_backup_dir(spec: DeviceSpec, paths: rundir.DevicePaths) -> None:
    """The directory of records and default backups is ours to make.

    Raises:
        NotPermittedError: it cannot be made.
    """
    if contents.keeps_record(spec) or spec.backup == str(paths.backup):
        try:
            paths.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise NotPermittedError(
                f"cannot create the backup directory: {error.strerror}",
                where=str(paths.store),
                mend="Run it as root, or name another place with --backup.",
            ) from error


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
        _print_json(
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
    _print_table(running, states)
    for note in rundir.unseen(run_dir, backup_dir):
        print(f"infiniswap: note: {note}", file=sys.stderr)
    return 0


def _is_lost(paths: rundir.DevicePaths) -> bool:
    try:
        kept = rundir.read_record(paths.kept)
    except InfiniswapError:
        return True  # a damaged record: `start` says how to mend it
    return kept is not None and contents.are_lost(paths, kept)


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _print_table(running: list[DeviceStatus], others: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not running and not others:
        print("no devices; `infiniswap device start NAME --size SIZE --donors HOST` makes one")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "STATE", "SIZE", "PATH", "SLABS MAPPED", "SWAP USED", "FROM DONORS"):
        table.add_column(heading)
    for device in running:
        share = "-" if device.remote_share is None else f"{device.remote_share:.0%}"
        swap = format_size_short(device.swap.used_bytes) if device.swap.active else "-"
        mapped, total = device.slabs["mapped"], sum(device.slabs.values())
        table.add_row(
            device.name,
            device.state if not device.alarms else f"{device.state} (!)",
            format_size(device.size_bytes),
            device.path,
            f"{mapped} of {total}",
            swap,
            share,
        )
    for name, state in sorted(others.items()):
        table.add_row(name, state, "-", "-", "-", "-", "-")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _show(args: argparse.Namespace) -> int:
    config = load_config(args)
    paths = rundir.require_running(args.name, config.device.run_dir, config.device.backup_dir)
    status = client.status(paths)
    if args.json:
        _print_json(status)
        return 0
    for label, value in describe(status):
        print(f"{label + ':':<16}{value}")
    return 0


def describe(status: DeviceStatus) -> list[tuple[str, str]]:
    """Rows of `device show`."""
    stats = status.stats
    share = "no page-in yet" if status.remote_share is None else f"{status.remote_share:.1%}"
    page = 4096
    swap = "no"
    if status.swap.active:
        swap = (
            f"priority {status.swap.priority}, {format_size_short(status.swap.used_bytes)} in use"
        )
    rows = [
        ("name", f"{status.name} ({status.device_id})"),
        ("state", f"{status.state}, process {status.pid}, up {status.uptime_s:.0f} s"),
        ("size", f"{format_size(status.size_bytes)}, slabs of {format_size(status.slab_bytes)}"),
        ("path", f"{status.path} ({status.frontend})"),
        ("backup", status.backup or "none"),
        ("swap", swap),
        ("slabs", ", ".join(f"{count} {state}" for state, count in status.slabs.items() if count)),
        ("on donors", format_size_short(status.pages_on_donors * page)),
        (
            "page-in",
            f"{format_size_short(stats['pages_in'] * page)}: "
            f"donors {format_size_short(stats['pages_in_remote'] * page)}, "
            f"staging {format_size_short(stats['pages_in_staging'] * page)}, "
            f"backup {format_size_short(stats['pages_in_backup'] * page)}, "
            f"zeros {format_size_short(stats['pages_in_zero'] * page)}",
        ),
        ("from donors", share),
        ("page-out", format_size_short(stats["pages_out"] * page)),
        ("page-in time", f"p50 {status.page_in_us_p50:.0f} µs, p99 {status.page_in_us_p99:.0f} µs"),
        (
            "backup reads",
            f"no donor {stats['fallback_unmapped']}, donor away {stats['fallback_suspended']}, "
            f"not there yet {stats['fallback_invalid']}, donor failed {stats['fallback_error']}, "
            f"donor slow {stats.get('fallback_slow', 0)} (pages)",
        ),
        (
            "staging",
            f"{stats['staging_pages_used']} of {stats['staging_pages']} pages, "
            f"{stats['staging_waits']} waits",
        ),
    ]
    for donor in status.donors:
        detail = f" ({donor.detail})" if donor.detail else ""
        wire = f", {donor.transport}" if donor.transport else ""
        tried = f"; tried again {donor.rdma_probes} times" if donor.rdma_probes else ""
        why = f" (no RDMA: {donor.transport_reason}{tried})" if donor.transport_reason else ""
        what = f"{donor.state}, {donor.slabs} slabs{wire}{why}{detail}"
        rows.append(("donor", f"{donor.address} {donor.name}: {what}"))
    rows.append(("processors", "kept awake" if status.awake else "may sleep"))
    if (succession := status.succession) is not None:
        rows.append(("standby", _describe_succession(succession)))
    rows += [("degraded", item) for item in status.degraded]
    rows += [("ALARM", item) for item in status.alarms]
    return rows


def _describe_succession(row: SuccessionRow) -> str:
    if not row.take_overs:
        return row.standby
    times = "one take-over" if row.take_overs == 1 else f"{row.take_overs} take-overs"
    return f"{row.standby}; {times}, the last ({row.reason}) with a pause of {row.pause_ms:.0f} ms"


def _stop(args: argparse.Namespace) -> int:
    config = load_config(args)
    paths = rundir.require_running(args.name, config.device.run_dir, config.device.backup_dir)
    client.stop(paths, remove=False)
    print(f"device {args.name}: stopped")
    return 0


def _reload(args: argparse.Namespace) -> int:
    config = load_config(args)
    paths = rundir.require_running(args.name, config.device.run_dir, config.device.backup_dir)
    answer = client.reload(paths)
    print(f"device {args.name}: reloaded: {', '.join(answer.applied) or 'nothing has changed'}")
    if answer.waiting:
        print(
            f"infiniswap: these keys wait for a stop and a start: {', '.join(answer.waiting)}",
            file=sys.stderr,
        )
    return 0


def _restart(args: argparse.Namespace) -> int:
    config = load_config(args)
    paths = rundir.require_running(args.name, config.device.run_dir, config.device.backup_dir)
    before = client.status(paths)
    if before.succession is None:
        return _stop_and_start(args, config, paths)
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
    again = _again(argparse.Namespace(**_NO_FLAGS, config=args.config), config, paths, kept, None)
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
