# SPDX-License-Identifier: Apache-2.0
"""The files of a stopped device: its record, and the tables that say which pages its backup holds.

The record (`NAME.device`) is written before the first page and stays until `remove`. The tables
(`NAME.tables`) exist only while the device is stopped: a start removes them before the first write,
and a stop writes them again. Sealed contents have their key beside them (`NAME.key`, see
device_key). A record without tables and without a process therefore means that
the process died. The newest pages of the backup are then unknown. A start refuses such a device,
because serving zeros or old pages as its contents would be worse than losing them. Swap space loses
nothing, because every start makes it again.
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
from infiniswap.system.files import overwrite, sync_directory, temporary_of

SETTLE_MS_MAX = 120_000


def keeps_record(spec: DeviceSpec) -> bool:
    """Whether the device can be started again after a stop."""
    return not spec.ephemeral and (spec.swap or spec.backup is not None)


def keeps_contents(spec: DeviceSpec) -> bool:
    """Whether its bytes outlive a stop."""
    return not spec.ephemeral and not spec.swap and spec.backup is not None


def are_kept(paths: DevicePaths, spec: DeviceSpec) -> bool:
    """Whether a start goes on with contents that a stop has kept."""
    return keeps_contents(spec) and not spec.discard_contents and paths.tables.exists()


def are_lost(paths: DevicePaths, kept: DeviceSpec) -> bool:
    """Whether a device that does not run has lost its contents, by its record."""
    return keeps_contents(kept) and not paths.tables.exists()


def check(paths: DevicePaths, spec: DeviceSpec) -> None:
    """Checks before anything is attached that the kept contents are there.

    Raises:
        BackupError: they are lost, or the backup has gone.
        ConflictError: a `run` would overwrite them.
        NotPermittedError: other users may put files there.
    """
    rundir.check_directories(paths.run.parent, paths.store)
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
    """Loads the kept contents, if there are any, into the engine; before any front end is made.

    Raises:
        BackupError: they cannot be read.
    """
    if not are_kept(paths, spec):
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
    """Notes that the contents change from now on, until a stop makes them whole again.

    Raises:
        NotPermittedError, SystemCallError: the record cannot be written.
    """
    if not keeps_record(spec):
        return
    rundir.write_record(paths.kept, msgspec.structs.replace(spec, discard_contents=False))
    _durably(paths, lambda: paths.tables.unlink(missing_ok=True))


def renew_seals(engine: Engine, spec: DeviceSpec) -> int:
    """After `load` and `begin`, before any front end: makes room for another start's key. Takes as
    long as it takes to read and write the pages of one earlier start, once in many starts. Returns
    how many pages were found damaged, and are lost now.

    Raises:
        BackupError: a page cannot be read or written.
    """
    if not (spec.config.device.seal and keeps_contents(spec)):
        return 0
    try:
        return engine.seal_anew()
    except EngineError as error:
        raise BackupError(
            f"the contents of device {spec.name} cannot be sealed again: {error.what}",
            where=spec.backup or "",
            mend="Check that disk (dmesg | tail), then start the device again. Or begin with "
            f"zeros: infiniswap device start {spec.name} --discard-contents.",
        ) from error


def save(engine: Engine, paths: DevicePaths, spec: DeviceSpec) -> None:
    """Saves the contents, after the front end has gone.

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
    keys = [paths.key, temporary_of(paths.key)]
    files = [paths.tables, *keys, paths.kept]
    for path in keys:  # what is left of the backup in freed blocks is not to be read again
        overwrite(path)
    if spec.backup_owned and spec.backup is not None:
        files.append(Path(spec.backup))
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror("cannot delete it", error, where=str(path)) from error


def _durably(paths: DevicePaths, call: Callable[[], None]) -> None:
    """Changes the directory and waits until the change is on the disk.

    Otherwise a power cut could bring back tables that are no longer true.
    """
    try:
        call()
        sync_directory(paths.store)
    except OSError as error:
        raise from_oserror(
            "cannot record the state of the contents", error, where=str(paths.store)
        ) from error


def check_backup_is_ours(spec: DeviceSpec, was_kept: bool) -> None:
    """Refuses a backup that would overwrite data of others.

    Raises:
        BackupError: it cannot be a backup, or has other data.
    """
    assert spec.backup is not None
    path = Path(spec.backup)
    target = check_backup(path, spec.engine_bytes)
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
