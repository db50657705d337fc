# SPDX-License-Identifier: Apache-2.0
"""What a stopped device keeps: its record, and the tables that say which pages its backup holds.

The record (`NAME.device`) is written before the first byte can be, and stays until `remove`. The
tables (`NAME.tables`) exist only while the device is stopped: they are taken away before anything
can be written and come back with a stop. So a record without tables and without a process means
that the process died. Which pages of the backup are the newest is then known to nobody, and
serving zeros, or old pages, as if they were the contents would be worse than losing them: it must
be said. Swap space is made anew by every start, so for that nothing is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from infiniswap.device.spec import rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.engine.protocol import Engine
from infiniswap.errors import BackupError, ConflictError, EngineError, from_oserror
from infiniswap.system.backup import check_backup, check_has_no_data, check_private
from infiniswap.system.files import sync_directory

SETTLE_MS_MAX = 120_000


def keeps_record(spec: DeviceSpec) -> bool:
    """Whether the device can be started again after a stop."""
    return not spec.ephemeral and (spec.swap or spec.backup is not None)


def keeps_contents(spec: DeviceSpec) -> bool:
    """Whether its bytes outlive a stop."""
    return not spec.ephemeral and not spec.swap and spec.backup is not None


def are_lost(paths: DevicePaths, kept: DeviceSpec) -> bool:
    """Whether a device that does not run has lost its contents, by its record."""
    return keeps_contents(kept) and not paths.tables.exists()


def check(paths: DevicePaths, spec: DeviceSpec) -> None:
    """Before anything is attached: contents that should be there must be.

    Raises:
        BackupError: they are lost, or the backup has gone.
        ConflictError: a `run` would overwrite them.
    """
    if spec.ephemeral and paths.kept.exists():
        raise ConflictError(
            f"a stopped device has the name {spec.name}, which `infiniswap run` has chosen",
            where=str(paths.kept),
            mend="Try again: it chooses another one.",
        )
    if spec.discard_contents or not keeps_contents(spec) or not paths.kept.exists():
        return
    again = (
        f"Begin with zeros: infiniswap device start {spec.name} --discard-contents, or delete it: "
        f"infiniswap device remove {spec.name}."
    )
    if are_lost(paths, spec):
        raise BackupError(
            "its contents are lost: its process or the host died before it was stopped, so it is "
            "not known which pages of the backup are the newest",
            where=f"device {spec.name}",
            mend=again,
        )
    if spec.backup is not None and not os.path.exists(spec.backup):
        raise BackupError(
            f"the backup with the contents of device {spec.name} is gone",
            where=spec.backup,
            mend=f"Bring it back. {again}",
        )


def load(engine: Engine, paths: DevicePaths, spec: DeviceSpec) -> None:
    """Makes the kept contents, if there are any, those of the engine. Before any front end.

    Raises:
        BackupError: they cannot be read.
    """
    if spec.discard_contents or not keeps_contents(spec) or not paths.tables.exists():
        return
    try:
        engine.load_tables(str(paths.tables))
    except EngineError as error:
        raise BackupError(
            f"the contents of device {spec.name} cannot be used: {error.what}",
            where=str(paths.tables),
            mend="Restore that file. Or begin with zeros: infiniswap device start "
            f"{spec.name} --discard-contents.",
        ) from error


def begin(paths: DevicePaths, spec: DeviceSpec) -> None:
    """From here on the contents can change: only a stop makes them whole again.

    Raises:
        NotPermittedError, SystemCallError: the record cannot be written.
    """
    if not keeps_record(spec):
        return
    rundir.write_record(paths.kept, msgspec.structs.replace(spec, discard_contents=False))
    _durably(paths, lambda: paths.tables.unlink(missing_ok=True))


def save(engine: Engine, paths: DevicePaths, spec: DeviceSpec) -> None:
    """The contents are whole. After the front end has gone.

    Raises:
        EngineError: the backup did not take every page, or the tables cannot be written.
    """
    if not keeps_contents(spec):
        return
    engine.settle(SETTLE_MS_MAX)
    _durably(paths, lambda: engine.save_tables(str(paths.tables)))


def delete(paths: DevicePaths, spec: DeviceSpec) -> None:
    """Deletes everything that a device keeps. It must not run.

    Raises:
        NotPermittedError, SystemCallError: a file cannot be deleted.
    """
    files = [paths.tables, paths.kept]
    if spec.backup_owned and spec.backup is not None:
        files.append(Path(spec.backup))
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror("cannot delete it", error, where=str(path)) from error


def _durably(paths: DevicePaths, call: Callable[[], None]) -> None:
    """Does something to the directory and waits until it is on the disk.

    A power cut must not bring tables back that no longer tell the truth.
    """
    try:
        call()
        sync_directory(paths.store)
    except OSError as error:
        raise from_oserror(
            "cannot record the state of the contents", error, where=str(paths.store)
        ) from error


def check_backup_is_ours(spec: DeviceSpec, was_kept: bool) -> None:
    """Refuses a backup that would overwrite what is not this device's.

    Raises:
        BackupError: it cannot be one, or somebody else's data is there.
    """
    assert spec.backup is not None
    path = Path(spec.backup)
    target = check_backup(path, spec.size_bytes)
    is_ours = spec.backup_owned or was_kept
    if not target.exists:
        return
    if not (is_ours or target.is_block_device) and target.path.stat().st_size:
        raise BackupError(
            "the file exists and is not empty; as a backup it would be overwritten",
            where=str(path),
            mend="Name another file with --backup.",
        )
    check_private(target.path, is_ours=is_ours)
    if target.is_block_device and not is_ours:
        check_has_no_data(target.path)
