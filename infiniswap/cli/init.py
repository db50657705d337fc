# SPDX-License-Identifier: Apache-2.0
"""`infiniswap init`: writes a commented configuration, fitted to this host; makes secrets and
certificates."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from infiniswap import config as configuration
from infiniswap.cli.common import certificates
from infiniswap.code_versions import packaged_in
from infiniswap.control.host_name import host_name
from infiniswap.directories import make_directory
from infiniswap.errors import (
    ConfigError,
    ConflictError,
    InfiniswapError,
    UsageError,
    from_oserror,
    is_utf8,
    not_utf8,
)
from infiniswap.units import GIB, MIB, format_size, format_size_short

if TYPE_CHECKING:
    from infiniswap.donor.memory import MemoryFigures

SECRET_FILE: Final = "secret"
"""Beside the configuration file."""
_SLABS_WANTED: Final = 8
"""A pool of fewer slabs than this is better cut into smaller ones."""


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "init",
        help="write a commented configuration, fitted to this host",
        description="Checks this host (memory, front ends, RDMA, a place for backups) and writes a "
        "configuration file with every key, its meaning and its default. Keys whose default does "
        "not suit this host are set; all others are commented out. An existing file is kept unless "
        "--force is given. With --secret, --session-key, --authority or --certificate it writes "
        "those files and nothing else.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: INFINISWAP_CONFIG, or {configuration.DEFAULT_PATH})",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the file, write nothing"
    )
    parser.add_argument(
        "--donors", metavar="H[:P],...", help="donors to enter into the file (cluster.peers)"
    )
    parser.add_argument(
        "--secret",
        type=Path,
        metavar="FILE",
        dest="new_secret",
        help="make a cluster secret (256 random bits) in this new file, and nothing else",
    )
    parser.add_argument(
        "--session-key",
        type=Path,
        metavar="FILE",
        help="write the session key of the configured cluster secret to this new file, and nothing "
        "else: a host that has it in place of the secret borrows memory, but cannot drain donors",
    )

    certificates.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Writes it."""
    if certificates.is_wanted(args):
        if args.new_secret is not None or args.session_key is not None:
            raise UsageError("a secret and certificates are two commands")
        return certificates.run(args)
    if args.new_secret is not None or args.session_key is not None:
        return _make_key(args)
    path = configuration.file_path(args.config).absolute()
    if not args.show and not args.force and os.path.lexists(path):
        raise ConflictError(
            "this file exists already",
            where=str(path),
            mend="`infiniswap config check` checks it; --force replaces it; --print shows what "
            "would be written.",
        )
    if not args.show and os.path.exists(path) and not os.path.isfile(path):
        raise UsageError("this is not a regular file and cannot be replaced", where=str(path))
    text = compose(path, args.donors)
    if args.show:
        print(text, end="")
        return 0
    _write(path, text, replace=args.force)
    print(f"wrote: {path}\n{_next(path)}")
    return 0


def _make_key(args: argparse.Namespace) -> int:
    from infiniswap.secret import new_secret, read_secret, write_secret

    if args.new_secret is not None and args.session_key is not None:
        raise UsageError("--secret and --session-key are two commands")
    if args.new_secret is not None:
        write_secret(args.new_secret, new_secret())
        print(f"wrote: {args.new_secret}\nNext: copy it to every host of the cluster, mode 0600.")
        return 0
    config = configuration.load(args.config)
    if config.cluster.secret_file is None:
        raise ConfigError(
            "no cluster secret is configured",
            where="cluster.secret_file",
            mend="Name the cluster's secret there, or set INFINISWAP_CLUSTER_SECRET_FILE.",
        )
    keys = read_secret(config.cluster.secret_file)
    write_secret(args.session_key, keys.session_key_text())
    print(
        f"wrote: {args.session_key}\nNext: copy it to the host that borrows, mode 0600, and name "
        "it there in [cluster] secret_file."
    )
    return 0


def compose(
    path: Path,
    donors: str | None = None,
    given: Mapping[str, str] | None = None,
    command: str = "init",
) -> str:
    """The file's text, fitted to this host.

    Args:
        path: where it will lie.
        donors: comma-separated addresses; None: the file names none.
        given: values that are known, as TOML, by key.
        command: that writes the file.

    Raises:
        UsageError: an address is wrong.
    """
    from infiniswap.config_text import render, toml_value
    from infiniswap.secret import make_command
    from infiniswap.units import parse_host_ports

    chosen: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    _memory(chosen, found)
    _backup(chosen, found)
    secret = path.with_name(SECRET_FILE)
    if given is not None:
        chosen |= given
    elif os.path.exists(secret):
        chosen["cluster.secret_file"] = toml_value(secret, {})
    else:
        found["cluster.secret_file"] = [
            f"{secret} does not exist yet; a host that lends to or borrows from others needs it. "
            f"{make_command(secret)} makes one for all hosts."
        ]
    if donors is not None:
        chosen["cluster.peers"] = toml_value(parse_host_ports(donors), {})
    _capabilities(found)
    addresses = ", ".join(sorted(own_addresses()))
    if addresses:
        found["daemon.listen"] = [f"this host's addresses are {addresses}."]
    head = (
        f"Configuration of Infiniswap, written by `infiniswap {command}` on {host_name()}.",
        "",
        "Every key is listed. A key after a # has its default: remove the # to set another value.",
        "Sizes are written 512M or 1G; keys that end in _s are seconds, in _ms milliseconds.",
        "`infiniswap config check` checks this file, and `systemctl reload` applies the keys that",
        "can change while daemon and devices run.",
    )
    return render(head, chosen, found)


def _memory(
    chosen: dict[str, str],
    found: dict[str, list[str]],
    read: Callable[[], MemoryFigures] | None = None,
) -> None:
    """Whether the default slab fits; a smaller one has to be set for daemon and devices."""
    from infiniswap.donor.memory import memory_source
    from infiniswap.donor.pool_limits import pool_limits

    try:
        figures = (read or memory_source(None).read)()
    except InfiniswapError as error:
        found["daemon.pool"] = [f"the memory figures cannot be read: {error}."]
        return
    slab_bytes = GIB
    while True:
        size = format_size(slab_bytes)
        config = configuration.load(Path("/dev/null"), {"daemon.slab": size}, {})
        with contextlib.suppress(ConfigError):
            limits = pool_limits(config, figures)
            if limits.slabs_max >= _SLABS_WANTED or slab_bytes <= 4 * MIB:
                break
        if slab_bytes <= MIB:
            found["daemon.pool"] = ["this host has no memory to lend."]
            return
        slab_bytes //= 4
    found["daemon.pool"] = [
        f"up to {format_size_short(limits.slabs_max * slab_bytes)} of "
        f"{format_size_short(figures.total_bytes)}."
    ]
    found["daemon.headroom"] = [f"{format_size_short(limits.headroom_bytes)}."]
    if slab_bytes != GIB:
        chosen["daemon.slab"] = chosen["device.slab"] = f'"{size}"'
        found["daemon.slab"] = [
            "smaller than the default, because this host has little memory. Use the same on "
            "every host."
        ]


def _backup(
    chosen: dict[str, str],
    found: dict[str, list[str]],
    check: Callable[[Path, int], object] | None = None,
    disks: Iterable[Path] | None = None,
) -> None:
    """Another place for backups, where the default one cannot hold them."""
    from infiniswap.cli.config.paths import PROBE_NAME, existing
    from infiniswap.config_text import toml_value
    from infiniswap.system.backup import MEND, check_backup
    from infiniswap.system.service_units import as_device

    check = check or check_backup

    def check_there(directory: Path) -> None:
        as_device(lambda: check(directory / PROBE_NAME, MIB))

    default = configuration.DeviceConfig().backup_dir
    try:
        check_there(existing(default))
    except InfiniswapError as error:
        why, more = error.what, error.mend.removeprefix(MEND)
    else:
        free = format_size_short(_free_bytes(existing(default)))
        found["device.backup_dir"] = [f"{free} free; a backup is as large as its device."]
        return
    for mount in _disks() if disks is None else disks:
        with contextlib.suppress(InfiniswapError):
            check_there(mount)
            chosen["device.backup_dir"] = toml_value(mount / "infiniswap", {})
            found["device.backup_dir"] = [
                f"{default} cannot hold backups ({why}); {format_size_short(_free_bytes(mount))} "
                "are free in this one."
            ]
            return
    found["device.backup_dir"] = [
        f"{default} cannot hold backups ({why}), and no mounted disk can. To use devices on this "
        f"host, name a directory on a local disk.{more}"
    ]


def _disks(proc: Path = Path("/proc")) -> Iterable[Path]:
    """Directories that disks are mounted at, the one with most free space first."""
    from infiniswap.system.files import try_read_text, unescape

    found = {Path("/var/tmp")}
    for line in (try_read_text(proc / "self/mounts") or "").splitlines():
        source, target = line.split()[:2]
        target = unescape(target)
        if source.startswith("/dev/") and not target.startswith(("/boot", "/efi", "/snap")):
            found.add(Path(target))
    # A bind mount of one file is a mount as well, and no directory.
    return sorted((path for path in found if path.is_dir()), key=_free_bytes, reverse=True)


def _free_bytes(path: Path) -> int:
    try:
        disk = os.statvfs(path)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def _capabilities(found: dict[str, list[str]]) -> None:
    """Findings of `infiniswap doctor`, at the keys that they concern."""
    from infiniswap.cli.doctor import host, rdma
    from infiniswap.cli.doctor.finding import OK, Check, guarded

    config = configuration.Config()
    checks: tuple[tuple[str, str, Check], ...] = (
        ("device.frontend", "front-ends", host.front_ends),
        ("device.transport", "rdma", lambda: rdma.rdma(config)),
        ("device.seal", "seal", lambda: host.seal(config)),
        ("device.keep_awake", "idle", lambda: host.idle(config)),
        ("device", "memory-cgroup", host.memory_cgroup),
    )
    for key, name, check in checks:
        for finding in guarded(name, check):
            if finding.name == "rdma-memlock":
                continue
            mend = "" if finding.state == OK else f" Mend: {finding.mend}"
            where = f"{finding.name}: " if key in ("device", "device.frontend") else ""
            text = f"{where}{finding.what.rstrip('.')}.{mend}"
            found.setdefault(key, []).append(" ".join(text.split()))


def own_addresses() -> set[str]:
    """This host's addresses that others may reach."""
    import psutil

    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
        and not entry.address.startswith(("127.", "::1", "fe80:"))
    }


def _write(path: Path, text: str, *, replace: bool) -> None:
    from infiniswap.secret import write_new

    temporary = path.with_name(f".{path.name}.new")
    if not is_utf8(text):  # it names the directory
        raise not_utf8(str(path.parent))
    try:
        if not replace:
            write_new(path, text.encode(), 0o644)
            return
        make_directory(path.parent, 0o755)
        temporary.touch(0o644)  # never writable by others
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise from_oserror("cannot write the configuration", error, where=str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _next(path: Path) -> str:
    at_boot = "infiniswap service install"
    if packaged_in() is not None:  # it has brought the units
        at_boot = "systemctl enable --now infiniswapd infiniswap-device@NAME"
    steps = [
        "Next:",
        f"  edit it:                    {os.environ.get('EDITOR') or 'editor'} {path}",
        f"  check it:                   infiniswap config check {path}",
        "  what this host can do:      infiniswap doctor",
        f"  daemon and devices at boot: {at_boot}",
    ]
    return "\n".join(steps)
