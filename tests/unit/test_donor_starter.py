# SPDX-License-Identifier: Apache-2.0
"""What root prepares for a daemon of another user, as far as it needs no mount
(tests/integration/test_donor_user.py has the rest)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from infiniswap import config as configuration
from infiniswap.config import Config, DaemonConfig, DeviceConfig
from infiniswap.donor import copies, starter
from infiniswap.donor.memory import HostMemorySource
from infiniswap.donor.starter import DaemonUser
from infiniswap.errors import ConfigError, InfiniswapError

pytestmark = pytest.mark.requires_root

USER = DaemonUser("nobody", 65534, 65534)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where release 0.1 kept the daemon's state, and where it is now; as the defaults."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(mode=0o700)
    new.mkdir()
    os.chown(new, USER.uid, USER.gid)
    daemon, device = DaemonConfig(state_dir=new, run_dir=None), DeviceConfig(backup_dir=old)
    monkeypatch.setattr(starter, "DaemonConfig", lambda: daemon)
    monkeypatch.setattr(starter, "DeviceConfig", lambda: device)
    return old, new


def prepare(state_dir: Path, **daemon: object) -> None:
    config = Config(daemon=DaemonConfig(state_dir=state_dir, run_dir=None))
    config = dataclasses.replace(config, daemon=dataclasses.replace(config.daemon, **daemon))  # type: ignore[arg-type]
    starter.prepare(config, USER, HostMemorySource(), None)


def test_state_of_a_daemon_of_root_moves_once(places: tuple[Path, Path]) -> None:
    old, new = places
    for name, mode in (("1-2-3.drain", 0o644), ("host-secret", 0o600), ("swap0.backup", 0o600)):
        (old / name).write_text(name)
        (old / name).chmod(mode)
    (new / "host-secret").write_text("newer")
    prepare(new)
    assert sorted(path.name for path in old.iterdir()) == ["host-secret", "swap0.backup"]
    moved = new / "1-2-3.drain"
    assert (moved.read_text(), moved.stat().st_uid) == ("1-2-3.drain", USER.uid)
    assert moved.stat().st_mode & 0o777 == 0o644
    assert (new / "host-secret").read_text() == "newer"
    prepare(new)


def test_half_a_file_is_not_moved(places: tuple[Path, Path]) -> None:
    old, new = places
    (old / "1.drain").mkdir()  # what cannot be read
    with pytest.raises(InfiniswapError):
        prepare(new)
    assert not list(new.iterdir())


def test_a_link_in_the_users_directory_leads_root_nowhere(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = places
    (old / "1.drain").touch()
    new.rmdir()
    new.symlink_to(tmp_path)
    with pytest.raises(InfiniswapError):
        prepare(new)
    assert not (tmp_path / "1.drain").exists()


def test_a_directory_of_somebodys_choice_is_left_as_it_is(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    chosen = tmp_path / "chosen"
    with pytest.raises(ConfigError, match=f"chown -R nobody: {chosen}"):
        prepare(chosen)
    chosen.mkdir()
    with pytest.raises(ConfigError):
        prepare(chosen)
    assert chosen.stat().st_uid == 0
    os.chown(chosen, USER.uid, -1)
    prepare(chosen)


def test_processors_stay_awake_only_where_that_is_configured(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu_dma_latency"
    path.touch(mode=0o600)
    monkeypatch.setattr(starter, "REQUEST_PATH", path)
    prepare(places[1])
    assert os.listxattr(path) == []
    prepare(places[1], keep_awake="auto")
    assert os.listxattr(path) == ["system.posix_acl_access"]


def test_a_daemon_that_is_given_no_copies_reads_the_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    config = configuration.load(Path("/dev/null"), {"cluster.secret_file": str(secret)}, {})
    assert copies.use(config, None) is config
    with pytest.raises(ConfigError, match=str(secret)):
        copies.use(config, tmp_path)
    (tmp_path / "cluster.secret_file").touch()
    assert copies.use(config, tmp_path).cluster.secret_file == tmp_path / "cluster.secret_file"
