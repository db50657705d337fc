# SPDX-License-Identifier: Apache-2.0
"""Sealed contents that outlive a stop, and what becomes of them where somebody has altered them.

Attacks on pages under way, and on those at donors: tests/c/test_engine_seal.c.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.devices.cluster import SLAB, Cluster, Device, until
from support.devices.copied import Copied
from support.machine.ran import ran

from infiniswap.errors import BackupError, ConfigError
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 16 * MIB
PAGE = 7


@pytest.fixture
def stopped(shared_cluster: Cluster, tmp_path: Path) -> tuple[Device, Copied]:
    """A device that has been stopped, with its contents kept."""
    device = shared_cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    contents = Copied(device, tmp_path)
    contents.fill(SIZE)
    device.stop()
    return device, contents


def files(device: Device) -> dict[str, bytes]:
    """What a stopped device has left, by its kind."""
    found = device.backup.parent.glob(f"{device.name}.*")
    return {path.suffix.removeprefix("."): path.read_bytes() for path in found}


def kept(device: Device, kind: str) -> Path:
    return device.backup.with_suffix(f".{kind}")


def alter(path: Path, offset: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def start(device: Device, *args: str, **changes: str) -> None:
    device.cluster.ok("device", "start", device.name, *args, **changes)


def refused(device: Device, code: int, *words: str) -> None:
    """That it does not start, and why; nothing is attached or changed."""
    before = files(device)
    done = device.cluster.cli("device", "start", device.name)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not device.run.exists()
    assert files(device) == before


def test_contents_outlive_stops_and_nothing_of_them_lies_on_the_disk_in_clear(
    stopped: tuple[Device, Copied], tmp_path: Path
) -> None:
    device, contents = stopped
    original = (tmp_path / "original").read_bytes()
    for _ in range(2):
        found = files(device)
        assert set(found) == {"backup", "device", "key", "tables"}
        backup = found["backup"]
        assert not any(
            original[at : at + PAGE_BYTES] == backup[at : at + PAGE_BYTES]
            for at in range(0, SIZE, PAGE_BYTES)
        )
        start(device)
        status = device.status
        assert status["sealed"]
        assert not any(item.startswith("seal") for item in status["degraded"])
        contents.read_back()
        assert "sealed" in device.log
        device.stop()
    device.remove()
    assert not files(device)


@pytest.mark.parametrize("seal", ["true", "false"])
def test_kept_contents_stay_as_they_were_begun(
    shared_cluster: Cluster, tmp_path: Path, seal: str
) -> None:
    """Whatever the configuration says later, as after an upgrade of a release without seals."""
    begun = {"INFINISWAP_DEVICE_SEAL": seal}
    other = {"INFINISWAP_DEVICE_SEAL": "false" if seal == "true" else "true"}
    device = shared_cluster.start("--frontend", "nbd-socket", size=str(SIZE), **begun)
    contents = Copied(device, tmp_path)
    contents.fill(SIZE)
    device.stop()
    assert kept(device, "key").exists() == (seal == "true")
    if seal == "false":  # its record says nothing of seals
        record = json.loads(kept(device, "device").read_text())
        del record["seal"], record["host_key_file"], record["config"]["seal"]
        kept(device, "device").write_text(json.dumps(record))
    done = shared_cluster.cli("device", "start", device.name, **other)
    assert done.returncode == 0, done.stderr
    warned = f"device remove {device.name}, and start it again" in done.stderr
    status = device.status
    assert status["sealed"] == (seal == "true")
    degraded = [item for item in status["degraded"] if item.startswith("seal: ")]
    assert len(degraded) == warned == (seal == "false")
    contents.read_back()
    # Nor does a reload wait for anything.
    done = device.command("reload")
    assert (done.returncode, "device.seal" in done.stdout + done.stderr) == (0, False)
    device.stop()
    start(device, "--discard-contents", **other)
    assert device.status["sealed"] == (seal == "false")
    device.stop()
    assert kept(device, "key").exists() == (seal == "false")


def test_altered_tables_are_refused(stopped: tuple[Device, Copied]) -> None:
    device, contents = stopped
    tables = kept(device, "tables")
    whole = tables.read_bytes()
    for offset in (8, len(whole) // 2, len(whole) - 1):
        alter(tables, offset)
        refused(device, BackupError.exit_code, str(tables), "--discard-contents")
        alter(tables, offset)
    start(device)
    contents.read_back()


def test_tables_of_another_device_are_refused(stopped: tuple[Device, Copied]) -> None:
    device, contents = stopped
    other = device.cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    other.stop()
    tables = kept(device, "tables")
    whole = tables.read_bytes()
    shutil.copy(kept(other, "tables"), tables)
    refused(device, BackupError.exit_code, str(tables), "another key")
    tables.write_bytes(whole)
    start(device)
    contents.read_back()


HARM: tuple[tuple[str, Callable[[Path], None], int], ...] = (
    ("key", Path.unlink, BackupError.exit_code),
    ("key", lambda path: alter(path, 20), BackupError.exit_code),
    ("host-key", Path.unlink, BackupError.exit_code),
    ("host-key", lambda path: alter(path, 20), BackupError.exit_code),
    ("host-key", lambda path: path.chmod(0o644), ConfigError.exit_code),
)


def test_a_device_whose_key_cannot_be_had_is_not_attached(stopped: tuple[Device, Copied]) -> None:
    device, contents = stopped
    state = Path(device.cluster.env["INFINISWAP_DEVICE_BACKUP_DIR"])
    for file, harm, code in HARM:
        path = state / file if file == "host-key" else kept(device, file)
        whole = path.read_bytes()
        harm(path)
        refused(device, code, str(path))
        path.write_bytes(whole)
        path.chmod(0o600)
    start(device)
    contents.read_back()


def test_an_altered_page_is_an_error_where_only_the_backup_has_it(
    stopped: tuple[Device, Copied], tmp_path: Path
) -> None:
    device, contents = stopped
    alter(device.backup, PAGE * PAGE_BYTES + 100)
    start(device)
    back = tmp_path / "altered"
    done = ran("nbdcopy", device.uri, str(back))
    assert done.returncode != 0
    assert f"page {PAGE} came back from the backup with other bytes" in device.status["alarms"]
    # Put right it is read again: nothing was forgotten, and nothing was made up.
    alter(device.backup, PAGE * PAGE_BYTES + 100)
    contents.read_back()


def test_an_altered_page_is_read_from_the_donor_that_has_it(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    device = shared_cluster.start("--frontend", "nbd-socket", size=str(SIZE))
    contents = Copied(device, tmp_path)
    contents.fill(SIZE)
    until(lambda: device.status["stats"]["staging_pages_used"] == 0, "an empty staging")
    for page in range(0, SIZE // PAGE_BYTES, SLAB // PAGE_BYTES // 64):
        alter(device.backup, page * PAGE_BYTES + 1)
    for _ in range(2):
        counted = contents.read_back()
        assert counted["requests_failed"] == 0


def test_an_earlier_stop_put_back_whole_is_not_noticed(
    stopped: tuple[Device, Copied], tmp_path: Path
) -> None:
    """As docs/security.md says: nothing outside of these files tells which stop was the last."""
    device, contents = stopped
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    for path in device.backup.parent.glob(f"{device.name}.*"):
        shutil.copy(path, earlier)
    start(device)
    other = Copied(device, tmp_path / "other")
    (tmp_path / "other").mkdir()
    other.fill(SIZE)
    device.stop()
    for path in earlier.iterdir():
        shutil.copy(path, device.backup.parent / path.name)
    start(device)
    contents.read_back()
    device.stop()
    # Half of it is: pages that were written since do not open with the earlier seals.
    start(device)
    other.write()
    device.stop()
    shutil.copy(earlier / kept(device, "tables").name, kept(device, "tables"))
    start(device)
    assert ran("nbdcopy", device.uri, str(tmp_path / "half")).returncode != 0
