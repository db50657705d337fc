# SPDX-License-Identifier: Apache-2.0
"""`infiniswap service`: systemd units for the daemon and for devices."""

from __future__ import annotations

import argparse
import grp
import os
import pwd
import stat
import sys
from pathlib import Path
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.cli.service import left_in_place
from infiniswap.code_versions import packaged_in
from infiniswap.config import DaemonConfig
from infiniswap.device.spec.rundir import running_names
from infiniswap.donor import copies, home
from infiniswap.errors import (
    ConfigError,
    ConflictError,
    NotPermittedError,
    UnavailableError,
    UsageError,
)
from infiniswap.own_code import (
    CODE_OWNER,
    INSTALL_DIR,
    check_own_code,
    code_paths,
    trusted_users,
)
from infiniswap.rights import DONOR_USER, user_number
from infiniswap.system import service_units, systemd
from infiniswap.system.programs import run_command
from infiniswap.system.service_units import DAEMON_UNIT, DEVICE_UNIT, UNITS

GROUP = "infiniswap"
"""Whose members may use declared devices; made by `install` (device.group names another one)."""

_USERADD: Final = (
    *("useradd", "--system", "--user-group", "--no-create-home"),
    *("--home-dir", str(DaemonConfig().state_dir), "--shell", "/usr/sbin/nologin", DONOR_USER),
)


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "service",
        help="run daemon and devices as systemd services",
        description="Installs and removes the systemd units infiniswapd.service (the daemon) and "
        "infiniswap-device@.service (one device, by its name).",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    install = actions.add_parser(
        "install",
        help="write the units; start and enable nothing",
        description="Writes the units with the paths of this installation, makes the group "
        "infiniswap and the daemon's user infiniswap-donor, and prints the next steps. Units that "
        "exist already are updated. Refuses an installation that other users can change, or that "
        "the daemon's user cannot read.",
    )
    install.add_argument(
        "--print", action="store_true", dest="show", help="print the units, write nothing"
    )
    uninstall = actions.add_parser(
        "uninstall",
        help="remove the units",
        description="Removes the units, the links that enable them, empty directories of "
        "Infiniswap, and the group infiniswap if it has no members. Refuses while one of the "
        "services runs. Settings and the contents of devices stay; the command lists them.",
    )
    uninstall.add_argument(
        "--purge",
        action="store_true",
        help="also remove settings, the files beside them that they name (secret, tokens, "
        "certificates), device declarations, the contents of stopped devices and the user "
        "infiniswap-donor",
    )
    for action in (install, uninstall):
        action.add_argument("--dry-run", action="store_true", help="only print what would be done")
        action.add_argument(
            "--root",
            type=Path,
            metavar="DIR",
            help="work on the system below DIR, without asking systemd",
        )


def run(args: argparse.Namespace) -> int:
    """Does it."""
    root = _root(args)
    _check_no_package(args, root)
    if args.action == "install":
        return _show() if args.show else _install(args, root)
    return _uninstall(args, root)


def _check_no_package(args: argparse.Namespace, root: Path) -> None:
    """Raises ConflictError where the Debian package has units: ours would hide them."""
    if args.action == "install" and args.show:
        return
    if packaged_in() is not None:
        raise ConflictError(
            f"this installation is the Debian package, so `infiniswap service {args.action}` has "
            "nothing to do",
            where=str(packaged_in()),
            mend="The package has installed the units: systemctl enable --now infiniswapd. `apt "
            "remove infiniswap` removes them, `apt purge infiniswap` settings and contents too.",
        )
    unit = root / service_units.PACKAGE_UNIT_DIR / DAEMON_UNIT
    if args.action == "install" and unit.exists():
        raise ConflictError(
            "the Debian package of Infiniswap has installed its units, which those of this "
            "installation would hide",
            where=str(unit),
            mend="Use the package's: systemctl enable --now infiniswapd. Or remove it first: apt "
            "remove infiniswap.",
        )


def _root(args: argparse.Namespace) -> Path:
    """Where to work.

    Raises:
        UsageError: --root is no directory.
    """
    if args.root is None:
        return Path("/")
    root: Path = args.root
    if not root.is_dir():
        raise UsageError("no such directory", where=f"--root {root}", mend="Make it first.")
    return root.absolute()


def command() -> tuple[str, ...]:
    """What runs `infiniswap` of this very installation, in a virtual environment or not.

    The interpreter's path is left as it is: what a virtual environment's link leads to would run
    outside of it.
    """
    interpreter = Path(sys.executable)
    script = interpreter.with_name("infiniswap")
    if os.access(script, os.X_OK):
        return (str(script),)
    return (str(interpreter), "-I", "-m", "infiniswap")


def _show() -> int:
    for name in UNITS:
        print(f"# /{service_units.UNIT_DIR / name}")
        print(service_units.render(name, command()))
    return 0


def _is_host(args: argparse.Namespace) -> bool:
    """Whether it is about this very host.

    Raises:
        UnavailableError: it is, and has no systemd.
        NotPermittedError: it is, and we are not root.
    """
    if args.root is not None:
        return False
    if not systemd.is_running():
        raise UnavailableError(
            "systemd is not the init system of this host, so services cannot be installed",
            mend="`infiniswap service install --print` shows the units, `--root DIR` writes them "
            "into the system below DIR. Without systemd start `infiniswap daemon` and "
            "`infiniswap device start NAME --foreground` from this host's init system.",
        )
    if not args.dry_run and os.geteuid() != 0:
        raise NotPermittedError(
            "changing this host's units needs root", mend="Run it with sudo, or with --dry-run."
        )
    return True


# -------------------------------------------------------------------------- install


def _install(args: argparse.Namespace, root: Path) -> int:
    is_host = _is_host(args)
    if is_host:
        # Of systemd's service nobody is the sudo.
        owner = {name: os.environ[name] for name in (CODE_OWNER,) if name in os.environ}
        check_own_code(trusted_users(owner), for_unit=True)
        _check_readable()
    files = service_units.plan(root, command())
    would = "would write" if args.dry_run else "wrote"
    if not args.dry_run:
        service_units.write(files)
    for file in files:
        print(f"{'unchanged' if file.state == 'unchanged' else would}: {file.path}")
    if is_host:
        _prepare_host(dry_run=args.dry_run)
    else:
        print(f"make the group {GROUP} there: groupadd --system {GROUP}")
        print(f"make the user {DONOR_USER} there: {' '.join(_USERADD)}")
    _say_next()
    return 0


def _check_readable() -> None:
    """Raises ConflictError where the daemon's user could not run this installation."""
    for path in code_paths():
        for part in (*reversed(path.parents), path):
            mode = part.stat().st_mode
            needed = 0o005 if stat.S_ISDIR(mode) and part == path else 0o001
            if not stat.S_ISDIR(mode):
                needed = 0o004
            if mode & needed != needed:
                raise ConflictError(
                    f"the daemon runs as the user {DONOR_USER}, which may not read this "
                    "installation",
                    where=str(part),
                    mend=f"Install Infiniswap where every user may read it: {INSTALL_DIR}.",
                )


def _prepare_host(*, dry_run: bool) -> None:
    """Makes the group and the user, and tells systemd of the units."""
    for what, there, argv in (
        (f"the group {GROUP}", _group_exists(), ["groupadd", "--system", GROUP]),
        (f"the user {DONOR_USER}", user_number(DONOR_USER) is not None, list(_USERADD)),
    ):
        if not there and dry_run:
            print(f"would make {what}")
        elif not there:
            run_command(argv)
            print(f"made {what}")
    if dry_run:
        print("would run: systemctl daemon-reload")
    else:
        systemd.reload()


def _say_next() -> None:
    options = service_units.OPTIONS_DIR / "NAME.env"
    print(
        "\nNothing has been started or enabled. Next:\n  to lend this host's memory:   systemctl "
        f"enable --now infiniswapd\n  for a device of this host:    write {options} with one "
        "line,\n                                DEVICE_OPTIONS=--size 8G --donors HOST,... "
        "--swap\n                                systemctl enable --now infiniswap-device@NAME\n  "
        f"for users of such a device:   usermod -aG {GROUP} USER\nSettings of daemon and devices: "
        "/etc/infiniswap/infiniswap.toml"
    )


def _group_exists() -> bool:
    try:
        grp.getgrnam(GROUP)
    except KeyError:
        return False
    return True


# ------------------------------------------------------------------------ uninstall


def _uninstall(args: argparse.Namespace, root: Path) -> int:
    is_host = _is_host(args)
    if is_host:
        _check_inactive()
    config = uninstall_configuration(root)
    if args.purge:
        _check_no_device_runs(root / config.device.run_dir.relative_to("/"))
    paths = service_units.installed(root)
    if not args.dry_run:
        service_units.remove(paths)
    for path in paths:
        print(f"{'would remove' if args.dry_run else 'removed'}: {path}")
    if not paths:
        print("no units of Infiniswap are installed")
    _remove_copies(root / service_units.COPIES_DIR, dry_run=args.dry_run)
    for path in service_units.drop_ins(root):
        print(f"left in place, because Infiniswap did not write it: {path}")
    if is_host and not args.dry_run:
        systemd.reload()
    if is_host:
        _remove_group(dry_run=args.dry_run)
        _remove_empty_homes(config, dry_run=args.dry_run)
    _clear_up(root, config, args)
    if is_host:
        _remove_user(purge=args.purge, dry_run=args.dry_run)
    return 0


def uninstall_configuration(root: Path) -> configuration.Config:
    """Of the system below the root; where nothing says otherwise, and where it is broken, the
    defaults."""
    path = root / configuration.DEFAULT_PATH.relative_to("/")
    try:
        path.stat()
    except FileNotFoundError:
        return configuration.Config()
    except OSError:
        pass  # load() reports it
    try:
        return configuration.load(path, environ={})
    except ConfigError as error:
        print(
            f"the configuration cannot be read, so its defaults are used: {error}", file=sys.stderr
        )
    return configuration.Config()


def _check_no_device_runs(run_dir: Path) -> None:
    if names := running_names(run_dir):
        raise ConflictError(
            "devices run: " + ", ".join(names),
            mend="Stop them first: " + "; ".join(f"infiniswap device stop {n}" for n in names),
        )


def _clear_up(root: Path, config: configuration.Config, args: argparse.Namespace) -> None:
    places = left_in_place.places(root, config)
    for place in places:
        if args.purge:
            for path in left_in_place.own_files(place):
                print(f"{'would remove' if args.dry_run else 'removed'}: {path}")
        if args.dry_run:
            continue
        if args.purge:
            left_in_place.purge(place)
        left_in_place.tidy(place)
    for line in left_in_place.left(places, purged=args.purge, tidied=not args.dry_run):
        print(line)


def _check_inactive() -> None:
    """Raises ConflictError, with what to stop, while a unit runs."""
    states = systemd.units(DAEMON_UNIT, DEVICE_UNIT.replace("@.", "@*."))
    active = sorted(name for name, state in states.items() if state in systemd.ACTIVE_STATES)
    if active:
        raise ConflictError(
            "these services run: " + ", ".join(active),
            mend=f"Stop them first: systemctl disable --now {' '.join(active)}.",
        )


def _remove_group(*, dry_run: bool) -> None:
    try:
        group = grp.getgrnam(GROUP)
    except KeyError:
        return
    members = [*group.gr_mem, *(u.pw_name for u in pwd.getpwall() if u.pw_gid == group.gr_gid)]
    if members:
        print(f"the group {GROUP} is left in place, with its members: {', '.join(members)}")
    elif dry_run:
        print(f"would remove the group {GROUP}")
    else:
        run_command(["groupdel", GROUP])
        print(f"removed the group {GROUP}")


def _remove_copies(directory: Path, *, dry_run: bool) -> None:
    """Of secrets: the unit removes them when it stops, but not when --prepare was called by hand.
    The number of their owner could be another user's one day."""
    if dry_run and directory.is_dir():
        print(f"would remove: {directory}")
    elif not dry_run and copies.remove(directory):
        print(f"removed: {directory}")


def _remove_empty_homes(config: configuration.Config, *, dry_run: bool) -> None:
    """The daemon's user cannot unmount what root has mounted for it."""
    run_dir = config.daemon.run_dir
    for leftover in [] if run_dir is None else home.leftovers(run_dir):
        if leftover.used_bytes == 0 and not dry_run:
            home.release(leftover)


def _remove_user(*, purge: bool, dry_run: bool) -> None:
    """After its files: their number could be another user's one day."""
    if user_number(DONOR_USER) is None:
        return
    if not purge:
        print(f"the user {DONOR_USER} is left in place, as its files are; --purge removes it")
    elif dry_run:
        print(f"would remove the user {DONOR_USER}")
    else:
        run_command(["userdel", DONOR_USER])
        print(f"removed the user {DONOR_USER}")
