# SPDX-License-Identifier: Apache-2.0
"""What is said of a device process that does not come to serve, or no longer answers."""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from support.configs import configured
from support.devices.specs import device_spec

from infiniswap.device.control import client, launch
from infiniswap.device.spec import rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import ConflictError, DeadlineError, NotFoundError
from infiniswap.units import HostPort


@pytest.fixture
def paths(tmp_path: Path) -> DevicePaths:
    return rundir.paths_of("d", tmp_path / "run", tmp_path / "kept")


def make_spec(paths: DevicePaths, donor: HostPort, **changes: object) -> DeviceSpec:
    """A device that needs no kernel and no holder."""
    config = configured(
        device__frontend="nbd-socket",
        device__transport="tcp",
        device__run_dir=str(paths.run.parent),
        device__backup_dir=str(paths.store),
        device__slab="1M",
        device__standby="off",
        cluster__peers=str(donor),
        cluster__ask_s=60.0,
    )
    return device_spec(config, **changes)


@pytest.mark.parametrize("ephemeral", [False, True])
def test_the_log_is_named_unless_a_run_deletes_it_with_its_device(
    paths: DevicePaths, ephemeral: bool
) -> None:
    """As its process is killed when it asks its donor, which never answers."""
    before = set(psutil.Process().children())
    with socket.create_server(("127.0.0.1", 0)) as donor:

        def kill() -> None:
            connection, _ = donor.accept()
            for child in set(psutil.Process().children()) - before:
                if "infiniswap.device" in child.cmdline():
                    child.kill()
            connection.close()

        killer = threading.Thread(target=kill, name="killer")
        killer.start()
        spec = make_spec(paths, HostPort(*donor.getsockname()), ephemeral=ephemeral)
        with pytest.raises(DeadlineError, match="ended or did not answer") as failed:
            launch.start(spec, paths)
        killer.join()
    said = str(failed.value)
    assert (str(paths.log) in said) == (f"See {paths.log}." in said) == (not ephemeral)
    assert ("Its log is empty" in said) == ephemeral
    assert ephemeral or paths.log.exists()


def test_a_bug_while_a_device_starts_is_told_although_its_log_is_deleted(
    paths: DevicePaths,
) -> None:
    no_pid = 1 << 40
    with pytest.raises(client.DeviceError, match=r"OverflowError.*line \d+.*please report it"):
        launch.start(make_spec(paths, HostPort("127.0.0.1", 1), owner_pid=no_pid), paths)
    assert not paths.run.exists()


def test_an_error_has_the_last_lines_of_a_log_that_may_be_deleted(
    paths: DevicePaths,
) -> None:
    assert rundir.log_hint(paths, stays=False) == ""
    paths.run.mkdir(parents=True)
    paths.log.write_text("".join(f"line {number}\n" for number in range(1000)))
    tail = " | ".join(f"line {number}" for number in range(994, 1000))
    with pytest.raises(ConflictError, match="does not answer") as failed:
        client.status(paths)
    assert str(failed.value).endswith(f"It may be starting or stopping. Its log ends: {tail}")


def test_a_device_in_the_foreground_has_no_log_that_could_be_named(
    paths: DevicePaths, tmp_path: Path
) -> None:
    paths.run.mkdir(parents=True)
    paths.record.touch()
    with pytest.raises(NotFoundError, match="has died") as failed:
        rundir.require_running("d", tmp_path / "run", tmp_path / "kept")
    assert str(paths.log) not in str(failed.value)
    assert "journalctl -u infiniswap-device@d." in str(failed.value)
    paths.log.touch()
    with pytest.raises(NotFoundError, match=f"See {paths.log}"):
        rundir.require_running("d", tmp_path / "run", tmp_path / "kept")


def test_a_device_starts_where_no_temporary_file_can_be_made(
    paths: DevicePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(client.DeviceError, match="connection refused"):
        launch.start(make_spec(paths, HostPort("127.0.0.1", 1)), paths)
