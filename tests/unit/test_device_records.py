# SPDX-License-Identifier: Apache-2.0
"""Records of devices are believed if nobody but root and this user can have written them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.configs import configured
from support.devices.specs import device_spec

from infiniswap.cli.config.paths import check_directory
from infiniswap.cli.doctor import devices
from infiniswap.cli.main import main
from infiniswap.config import Config
from infiniswap.device.frontends import in_use
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import encode_spec
from infiniswap.errors import ConfigError, ConflictError, InfiniswapError, NotPermittedError
from infiniswap.system.files import is_held, overwrite, temporary_of

NOBODY = 65_534


class World:
    """Both directories of records, and a file that a planted record would have deleted."""

    def __init__(self, root: Path) -> None:
        self.run_dir, self.store, self.victim = root / "run", root / "kept", root / "victim"
        for directory in (self.run_dir, self.store):
            directory.mkdir(mode=0o755)
        self.victim.write_text("precious")

    @property
    def config(self) -> Config:
        return configured(device__run_dir=str(self.run_dir), device__backup_dir=str(self.store))

    def paths(self, name: str = "evil") -> DevicePaths:
        return rundir.paths_of(name, self.run_dir, self.store)

    def record(self, name: str = "evil") -> bytes:
        return encode_spec(
            device_spec(self.config, name=name, backup=str(self.victim), backup_owned=True)
        )

    def plant(self, kind: str, *, owner: int = 0) -> Path:
        """A whole record of device `evil`."""
        paths = self.paths()
        path = paths.kept if kind == "kept" else paths.record
        path.parent.mkdir(mode=0o755, exist_ok=True)
        path.write_bytes(self.record())
        for made in (path, paths.run) if kind == "run" else (path,):
            os.chown(made, owner, owner)
        return path

    def read(self, kind: str) -> object:
        paths = self.paths()
        return rundir.read_kept(paths) if kind == "kept" else rundir.read_record(paths)

    def command(self, *argv: str) -> int:
        return main(["device", *argv])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setenv("INFINISWAP_DEVICE_RUN_DIR", str(made.run_dir))
    monkeypatch.setenv("INFINISWAP_DEVICE_BACKUP_DIR", str(made.store))
    return made


@pytest.fixture(params=[0o000, 0o777])
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


KINDS = pytest.mark.parametrize("kind", ["run", "kept"])


@pytest.mark.requires_root
@KINDS
def test_remove_deletes_nothing_that_a_planted_record_names(
    world: World, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = world.store if kind == "kept" else world.run_dir
    directory.chmod(0o1777)
    world.plant(kind, owner=NOBODY)
    assert world.command("remove", "evil") == NotPermittedError.exit_code
    assert world.victim.read_text() == "precious"
    assert str(directory) in capsys.readouterr().err
    directory.chmod(0o755)
    assert world.command("remove", "evil") == NotPermittedError.exit_code
    assert world.victim.read_text() == "precious"


@pytest.mark.requires_root
def test_remove_empties_no_directory_that_a_planted_link_names(
    world: World, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").touch()
    run = world.paths().run
    run.mkdir()
    (run / "runs").symlink_to(others)
    os.chown(run, NOBODY, NOBODY)
    assert world.command("remove", "evil") == NotPermittedError.exit_code
    assert (others / "file").exists()
    assert "evil" not in rundir.died_names(world.run_dir)
    os.chown(run, 0, 0)  # however it came there
    rundir.clear(world.paths())
    assert (others / "file").exists()


@KINDS
def test_a_record_of_ours_is_believed(world: World, kind: str) -> None:
    assert world.read(kind) is None
    world.plant(kind, owner=os.geteuid())
    assert world.read(kind) is not None


def _writable(path: Path) -> None:
    path.chmod(0o666)


def _writable_by_its_group(path: Path) -> None:
    path.chmod(0o664)


def _with_two_names(path: Path) -> None:
    os.link(path, path.with_name("other"))


def _as_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("other")))


def _as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _in_a_writable_directory(path: Path) -> None:
    path.parent.chmod(0o1777)


@KINDS
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_writable, "mode 0666"),
        (_writable_by_its_group, "mode 0664"),
        (_with_two_names, "has 2 names"),
        (_as_a_link, "symbolic link"),
        (_as_a_pipe, "no regular file"),
        (_in_a_writable_directory, "mode 1777"),
    ],
)
def test_a_record_that_others_may_change_is_not_believed(
    world: World, kind: str, change: Callable[[Path], None], why: str
) -> None:
    change(world.plant(kind, owner=os.geteuid()))
    with pytest.raises(NotPermittedError, match=f"(?s)device evil is not believed.*{why}"):
        world.read(kind)


@KINDS
def test_a_record_under_another_devices_name_is_refused(world: World, kind: str) -> None:
    path = world.plant(kind, owner=os.geteuid())
    path.write_bytes(world.record("good"))
    with pytest.raises(ConfigError, match="is that of device good"):
        world.read(kind)


@pytest.mark.usefixtures("any_umask")
def test_records_have_their_modes_whatever_the_umask_is(tmp_path: Path) -> None:
    paths = rundir.paths_of("d", tmp_path / "far" / "run", tmp_path)
    os.close(rundir.take_lock(paths))
    rundir.write_record(paths.record, device_spec(configured()))
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (paths.run.parent.parent, paths.run.parent, paths.run, paths.record)
    }
    assert list(modes.values()) == [0o755, 0o755, 0o755, 0o600]


@pytest.mark.parametrize("place", ["run_dir", "store"])
def test_a_start_refuses_directories_that_others_may_write_to(world: World, place: str) -> None:
    spec = device_spec(world.config)
    contents.check(world.paths("d"), spec)
    getattr(world, place).chmod(0o777)
    with pytest.raises(NotPermittedError, match=r"mode 0777.*chmod go-w"):
        contents.check(world.paths("d"), spec)


def test_a_run_directory_that_others_may_write_to_is_not_locked(world: World) -> None:
    world.run_dir.chmod(0o777)
    with pytest.raises(NotPermittedError, match="chmod go-w"):
        rundir.take_lock(world.paths("d"))
    assert not world.paths("d").run.exists()


def test_a_lock_that_is_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert is_held(tmp_path / "lock") is False


def test_what_a_link_leads_to_is_not_overwritten(world: World) -> None:
    key = world.paths("d").key
    key.symlink_to(world.victim)
    overwrite(key)
    assert world.victim.read_text() == "precious"
    overwrite(world.victim)
    assert world.victim.read_bytes() == bytes(8)


@pytest.mark.parametrize("key", ["device.run_dir", "device.backup_dir", "daemon.run_dir"])
def test_config_check_looks_at_the_directories_of_records(world: World, key: str) -> None:
    check_directory(key, world.store)
    world.store.chmod(0o1777)
    with pytest.raises(InfiniswapError, match="chmod"):
        check_directory(key, world.store)


def test_doctor_names_records_that_are_not_believed(world: World) -> None:
    (found,) = devices.records(world.config)
    assert found.state == "ok"
    for kind in ("run", "kept"):
        world.plant(kind, owner=os.geteuid()).chmod(0o666)
    run, kept = devices.records(world.config)
    assert "device.json" in run.what
    assert "evil.device" in kept.what
    assert "chmod 600" in kept.mend
    world.run_dir.chmod(0o777)
    (found,) = devices.records(world.config)
    assert f"{world.run_dir}: the directory can be changed by other users" in found.what


@KINDS
@pytest.mark.requires_root
def test_all_commands_agree_on_a_record_not_believed(
    world: World, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command is advised that will be refused."""
    path = world.plant(kind)
    os.chown(path, NOBODY, NOBODY)
    state = f"not believed: {path}: the file belongs to another user ({NOBODY})"
    file = tmp_path / "infiniswap.toml"
    file.write_text(f'[device]\nrun_dir = "{world.run_dir}"\nbackup_dir = "{world.store}"\n')

    def told(*command: str) -> tuple[int, str]:
        code = main([*command, "--config", str(file)])
        out, err = capsys.readouterr()
        return code, out + err

    assert state in told("device", "list")[1]
    assert json.loads(told("device", "list", "--json")[1])["not_believed"] == {"evil": state}
    code, said = told("device", "show", "evil")
    assert code == NotPermittedError.exit_code
    assert "the record of device evil is not believed" in said
    code, said = told("config", "check")
    assert code == ConfigError.exit_code
    assert str(path) in said
    findings = [*devices.devices(world.config), *devices.left_behind(world.config)]
    about = [f for f in findings if "evil" in f.what]
    assert about
    for finding in about:
        assert state in finding.what
        assert "infiniswap device" not in finding.mend


@pytest.mark.requires_root
def test_remove_names_a_stopped_device_whose_backup_lies_there(
    world: World, tmp_path: Path
) -> None:
    lower = tmp_path / "lower"
    os.mknod(lower, stat.S_IFBLK | 0o600, os.stat(world.victim).st_dev)
    world.paths("upper").kept.write_bytes(world.record("upper"))
    with pytest.raises(ConflictError, match=r"backup of device upper.*device remove upper"):
        in_use.check_unused(lower, device_spec(world.config, name="lower"), removes=True)


def test_a_record_that_was_half_written_goes_with_its_directory(tmp_path: Path) -> None:
    """Its process was killed in between."""
    paths = rundir.paths_of("one", tmp_path, tmp_path)
    paths.run.mkdir()
    temporary_of(paths.record).write_text("{")
    rundir.clear(paths)
    assert not paths.run.exists()
