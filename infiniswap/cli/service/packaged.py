# SPDX-License-Identifier: Apache-2.0
"""What the Debian package's scripts and units call: `python3 -I -m infiniswap.cli.service.packaged`

    sweep   removes code of earlier versions that no process needs
    leave   before the package is removed: refuses while something is in use; else stops what runs,
            and writes down what a purge has to remove, as the code is gone by then

tools/deb_package/scripts/ has the scripts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from infiniswap import code_versions
from infiniswap import config as configuration
from infiniswap.cli.main import report
from infiniswap.cli.service import left_in_place, uninstall_configuration
from infiniswap.code_versions import CodeProcess
from infiniswap.device.cleanup.leftovers import owners_of_areas
from infiniswap.device.spec.rundir import LINK_DIR, running_names
from infiniswap.directories import make_directory
from infiniswap.donor import copies, home
from infiniswap.errors import ConflictError, InfiniswapError, UsageError, from_oserror
from infiniswap.system import service_units, swap, systemd
from infiniswap.system.programs import run_command
from infiniswap.system.service_units import DAEMON_UNIT
from infiniswap.units import counted

PURGE_LIST: Final = Path("var/lib/infiniswap/purge-list")
"""Below the root: the files, and then the directories (with a slash), that a purge removes."""

_STOP_S_MAX: Final = 150.0
"""TimeoutStopSec= of the daemon, and some more."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        if list(argv) == ["sweep"]:
            sweep()
        elif list(argv) == ["leave"]:
            leave(Path("/"))
        else:
            raise UsageError("the Debian package calls this, with `sweep` or `leave`")
    except InfiniswapError as error:
        report(error)
        return error.exit_code
    return 0


def sweep() -> None:
    """Raises InfiniswapError where earlier code cannot be removed."""
    top = code_versions.packaged_in()
    if top is None:
        raise UsageError("this installation is not the Debian package")
    if kept := code_versions.sweep(top):
        numbers = ", ".join(str(process.pid) for process in kept)
        print(
            f"infiniswap: earlier code is kept for processes started with it ({numbers}); "
            "`infiniswap device restart NAME` moves a device to the new code",
            file=sys.stderr,
        )


def leave(root: Path) -> None:
    """Makes this host ready for the removal of the package.

    Raises:
        ConflictError: something is in use; nothing has changed.
        InfiniswapError: it could not be stopped.
    """
    config = uninstall_configuration(root)
    check_unused(root, config)
    check_no_process()
    if systemd.is_running(root):
        run_command(["systemctl", "stop", DAEMON_UNIT], timeout_s=_STOP_S_MAX)
    service_units.remove(service_units.enabling_links(root))
    run_dir = config.daemon.run_dir
    for leftover in [] if run_dir is None else home.leftovers(root / run_dir.relative_to("/")):
        home.release(leftover)
    for process in _processes():  # what has waited to do the same
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    copies.remove(root / service_units.COPIES_DIR)
    for place in left_in_place.places(root, config):
        if not place.own:  # in /run and /dev
            left_in_place.tidy(place)
    write_purge_list(root, config)


def _processes() -> list[CodeProcess]:
    top = code_versions.packaged_in()
    return [] if top is None else code_versions.processes(top)


def check_no_process() -> None:
    """Raises ConflictError while a process runs that `leave` would not end: it would lose its
    code."""
    others = [
        process
        for process in _processes()
        if process.unit != DAEMON_UNIT and "--release" not in process.words
    ]
    if others:
        command = " ".join(others[0].words[:8]).strip()
        raise ConflictError(
            f"process {others[0].pid} runs code of the package: {command}",
            mend="End it first: kill " + " ".join(str(process.pid) for process in others),
        )


def check_unused(root: Path, config: configuration.Config) -> None:
    """Raises ConflictError, with what to do, while this host pages to others or others to it."""
    run_dir = root / config.device.run_dir.relative_to("/")
    areas = swap.active_areas()
    swapping = {owner.name for owner in owners_of_areas(areas, run_dir).values()}
    paths = {area.path for area in areas}
    for name in running_names(run_dir):  # a ublk device has no other mark of its owner
        if str((LINK_DIR / name).resolve()) in paths:
            swapping.add(name)
    if names := sorted(swapping):
        raise ConflictError(
            f"Infiniswap devices are in use as swap space: {', '.join(names)}",
            mend="End the jobs that use them (`infiniswap run`), and stop them: "
            + "; ".join(f"infiniswap device stop {name}" for name in names),
        )
    if names := running_names(run_dir):
        raise ConflictError(
            f"devices run: {', '.join(names)}",
            mend="Stop them: " + "; ".join(f"infiniswap device stop {name}" for name in names),
        )
    if config.daemon.run_dir is None:
        return
    lent = list(_lent_slabs(root / config.daemon.run_dir.relative_to("/")))
    if lent:
        raise ConflictError(
            f"this host lends {counted(len(lent), 'slab')}, which devices of other hosts use as "
            "swap space",
            where=str(lent[0].parent),
            mend="Have them moved first: infiniswap donor drain HOST. If their hosts are gone: "
            "systemctl stop infiniswapd, then infiniswap daemon --release.",
        )


def _lent_slabs(run_dir: Path) -> Iterator[Path]:
    """Files of slabs in use, see csrc/store/slab_dir.h."""
    yield from run_dir.glob("*/slabs/slab.*.mapped.*")


def write_purge_list(root: Path, config: configuration.Config) -> None:
    """Raises InfiniswapError where it cannot be written."""
    files: list[str] = []
    directories: list[str] = []
    for place in left_in_place.places(root, config):
        files += map(str, left_in_place.own_files(place))
        directories += [f"{path}/" for path in left_in_place.own_directories(place)]
    # A name with a line break is nobody's of ours.
    lines = [line for line in (*files, *directories) if "\n" not in line]
    path = root / PURGE_LIST
    try:
        make_directory(path.parent, 0o700)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise from_oserror("cannot write the list for a purge", error, where=str(path)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
