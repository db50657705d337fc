# SPDX-License-Identifier: Apache-2.0
"""Options that start a device, and the specification made from them."""

from __future__ import annotations

import argparse
import errno
import os
import uuid

import msgspec

from infiniswap import config as configuration
from infiniswap.cli.common.donors import donors_of
from infiniswap.cli.common.parser import add_shared
from infiniswap.device.frontends import FRONT_ENDS
from infiniswap.device.jobs.started_by import started_by
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.spec import (
    DeviceSpec,
    check_backup_choice,
    check_files,
    check_name,
    check_size,
    completed,
    host_key_file,
    source_fields,
    with_own_values,
    with_secret_file,
)
from infiniswap.directories import make_directory
from infiniswap.discovery.static import only_these
from infiniswap.errors import ConflictError, NotPermittedError, UsageError
from infiniswap.system.service_units import as_device
from infiniswap.units import format_size, parse_host_ports


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Options that `device start` and `run` share."""
    add_shared(parser, "--donors", "--secret-file")
    parser.add_argument(
        "--frontend",
        choices=("auto", *FRONT_ENDS),
        help="how the kernel sees the device (default auto: the first that works)",
    )
    parser.add_argument(
        "--backup",
        metavar="PATH|none",
        help="local copy of all pages: a file, a block device or none (default: a file in "
        "device.backup_dir)",
    )
    parser.add_argument(
        "--allow-data-loss",
        action="store_true",
        help="accept that swap with --backup none loses the pages of a lost donor",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", *configuration.TRANSPORT_NAMES),
        help="how pages travel (default auto: RDMA where both ends have it, else TCP)",
    )
    parser.add_argument("--slab", metavar="SIZE", help="size of the donors' slabs (default 1G)")
    parser.add_argument(
        "--tenant",
        metavar="TENANT",
        help="account that this device's memory counts on. The tenants of a host divide the host's "
        "share of each donor equally, however many devices each has (default: device.tenant, else "
        "this host)",
    )
    parser.add_argument(
        "--staging",
        metavar="SIZE",
        help="memory for pages on their way to donors and backup (default 64M)",
    )


def load_config(args: argparse.Namespace) -> configuration.Config:
    """Configuration with the flags of add_device_options on top. Names of donors become addresses
    in `args`, too: the device's process looks for no names."""
    path = getattr(args, "config", None)
    found = donors_of(getattr(args, "donors", None), path, _without_donors(args))
    if found is not None:
        args.donors = ",".join(map(str, found))
    return configuration.load(path, _overrides(args))


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    donors = getattr(args, "donors", None)
    these = only_these(None if donors is None else parse_host_ports(donors))
    return {**_without_donors(args), **these}


def _without_donors(args: argparse.Namespace) -> dict[str, object]:
    return {
        "device.frontend": getattr(args, "frontend", None),
        "device.transport": getattr(args, "transport", None),
        "device.slab": getattr(args, "slab", None),
        "device.staging": getattr(args, "staging", None),
        "device.metrics_listen": getattr(args, "metrics_listen", None),
        "device.tenant": getattr(args, "tenant", None),
        "cluster.secret_file": getattr(args, "secret_file", None),
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
    job: str = "",
) -> DeviceSpec:
    """A spec from flags and configuration.

    Raises:
        UsageError: they contradict each other.
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
        config=with_secret_file(config),
        backup=backup,
        backup_owned=args.backup is None or (backup is not None and not os.path.exists(backup)),
        swap=swap,
        ephemeral=ephemeral,
        owner_pid=owner_pid,
        discard_contents=getattr(args, "discard_contents", False),
        host_key_file=host_key_file(config),
        started_by=started_by(os.environ, os.getuid(), job),
        **source_fields(getattr(args, "config", None), _overrides(args)),
    )
    return spec if priority is None else with_own_values(spec, priority=priority)


def started_again(
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
    mend = (
        "Leave the option out to start the device as it was, or delete it first: infiniswap device "
        f"remove {kept.name}."
    )
    stopped = f"the stopped device {kept.name}"
    size, given = format_size(kept.size_bytes), size_bytes or kept.size_bytes
    other_backup = args.backup is not None and backup_path(args.backup, paths) != kept.backup
    for differs, what in (
        (given != kept.size_bytes, f"{stopped} has a size of {size}, not {format_size(given)}"),
        (
            args.swap and not kept.swap,
            f"{stopped} is not swap space; --swap would overwrite its contents",
        ),
        (other_backup, f"the backup of {stopped} is {kept.backup or 'none'}"),
    ):
        if differs:
            raise ConflictError(what, where=str(paths.kept), mend=mend)
    check_files(config)
    priority = checked_priority(args.priority)
    source = source_fields(args.config, _overrides(args))
    # A choice of an earlier start: what is kept is as it is, else the configuration says it anew.
    flags = {key: value for key, value in kept.flags.items() if key != "device.seal"}
    again = msgspec.structs.replace(
        kept,
        config=with_secret_file(completed(config, kept.config)),
        discard_contents=bool(args.discard_contents),
        config_file=source["config_file"],
        flags={**flags, **source["flags"]},
        host_key_file=host_key_file(config),
        started_by=started_by(os.environ, os.getuid()),
    )
    options = {
        "slab_bytes": args.slab,
        "frontend": args.frontend,
        "transport": args.transport,
        "staging_bytes": args.staging,
    }
    if "device.tenant" in kept.flags:
        options["tenant"] = args.tenant
    own = {key: getattr(kept.config.device, key) for key in options if options[key] is None}
    own["priority"] = kept.config.device.priority if priority is None else priority
    if contents.keeps_contents(kept) and not args.discard_contents:
        own["seal"] = kept.config.device.seal
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
    """The directory of records and default backups is ours to make, with the rights that the
    device's process has there.

    Raises:
        NotPermittedError: it cannot be made, or written to.
    """

    def make() -> None:
        make_directory(paths.store, 0o700)
        if not os.access(paths.store, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if contents.keeps_record(spec) or spec.backup == str(paths.backup):
        try:
            as_device(make)
        except OSError as error:
            mend = "Run it as root, or name another place with --backup."
            if os.geteuid() == 0:
                mend = (
                    "Name a directory of root's in device.backup_dir: a device has not all of "
                    "root's rights."
                )
            raise NotPermittedError(
                f"cannot write to the backup directory: {error.strerror}",
                where=str(paths.store),
                mend=mend,
            ) from error
