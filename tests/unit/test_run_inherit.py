# SPDX-License-Identifier: Apache-2.0
"""What a `run` beside running ones must have in common with them, and what it takes from them."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.devices.device_status import device_status
from support.donors.donor_world import SECRET

from infiniswap import config as configuration
from infiniswap.cli.device.options import add_device_options, backup_path, load_config, make_spec
from infiniswap.cli.run import inherit
from infiniswap.device.api import DeviceStatus, SwapRow
from infiniswap.device.jobs import beside
from infiniswap.device.jobs.beside import RunDevice
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import ConfigError, ConflictError, UsageError
from infiniswap.units import MIB

PID = 4711


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_device_options(parser)
    parser.add_argument("--config", type=Path)
    return parser.parse_args(argv)


class Host:
    """Runs on a host whose configuration file is `text`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "infiniswap.toml"
        self.secrets = [root / "secret", root / "copy", root / "other"]
        for path, text in zip(self.secrets, (SECRET, SECRET, SECRET[::-1]), strict=True):
            path.write_text(text)
            path.chmod(0o600)
        self.configure("")

    def configure(self, text: str) -> None:
        self.file.write_text(text)

    def spec(self, *argv: str, others: tuple[RunDevice, ...] = (), name: str = "run") -> DeviceSpec:
        """Of the device that a run with these options would make."""
        args = parse("--config", str(self.file), *argv)
        config = load_config(args)
        args, config = inherit.like(args, config, others, name)
        spec = make_spec(args, config, name=name, size_bytes=64 * MIB, swap=True, ephemeral=True)
        return inherit.recorded(spec, others)

    def running(self, *argv: str, name: str = "run") -> tuple[RunDevice, ...]:
        """A run with these options that is running."""
        spec = self.spec(*argv, name=name)
        device = spec.config.device
        paths = rundir.paths_of(name, device.run_dir, device.backup_dir)
        return (RunDevice(paths, spec, status(spec)),)


def status(spec: DeviceSpec) -> DeviceStatus:
    return device_status(
        name=spec.name,
        device_id=spec.device_id,
        slab_bytes=spec.config.device.slab_bytes,
        backup=spec.backup,
        swap=SwapRow(active=True, priority=101, used_bytes=0),
        runs=[PID],
    )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    for key in configuration.known_keys():
        monkeypatch.delenv(configuration.env_name(key), raising=False)
    monkeypatch.setenv("INFINISWAP_DAEMON_STATE_DIR", str(tmp_path))  # no secret of this host's
    return Host(tmp_path)


FIRST = ("--donors", "10.0.0.2,10.0.0.3", "--transport", "tcp", "--slab", "64M")


@pytest.mark.parametrize(
    ("first", "second", "named", "theirs"),
    [
        (FIRST, ("--donors", "10.0.0.9"), "--donors", "10.0.0.2:9400, 10.0.0.3:9400"),
        (FIRST, ("--donors", "10.0.0.2"), "--donors", "10.0.0.2:9400, 10.0.0.3:9400"),
        (FIRST, ("--transport", "rdma"), "--transport", "tcp"),
        (FIRST, ("--transport", "auto"), "--transport", "tcp"),
        (FIRST, ("--frontend", "ublk"), "--frontend", "fuse"),
        (FIRST, ("--slab", "1G"), "--slab", "64M"),
        (FIRST, ("--secret-file", "A"), "--secret-file", "no secret"),
        ((*FIRST, "--secret-file", "A"), ("--secret-file", "B"), "--secret-file", "secret"),
        (FIRST, ("--backup", "/mnt/b"), "--backup", "a file in"),
        (FIRST, ("--backup", "none", "--allow-data-loss"), "--backup", "a file in"),
        ((*FIRST, "--backup", "/mnt/a"), ("--backup", "/mnt/b"), "--backup", "/mnt/a"),
        ((*FIRST, "--backup", "none", "--allow-data-loss"), (), "--backup", "none"),
    ],
)
def test_what_a_second_run_names_otherwise_is_refused_and_the_running_one_named(
    host: Host, first: tuple[str, ...], second: tuple[str, ...], named: str, theirs: str
) -> None:
    files = {"A": str(host.secrets[0]), "B": str(host.secrets[2])}
    others = host.running(*(files.get(part, part) for part in first))
    with pytest.raises(ConflictError) as caught:
        host.spec(*(files.get(part, part) for part in second), others=others, name="run-2")
    assert caught.value.what.startswith(f"{named} differs from that of the `infiniswap run`")
    assert f"(process {PID})" in caught.value.what
    assert theirs in caught.value.what
    assert named in caught.value.mend
    assert "wait until that run has ended" in caught.value.mend


def test_what_a_second_run_does_not_name_it_takes_from_the_running_one(host: Host) -> None:
    first = (*FIRST, "--secret-file", str(host.secrets[0]))
    others = host.running(*first)
    spec, theirs = host.spec(others=others, name="run-2"), others[0].spec
    # A priority like theirs: the areas are used in turn.
    device = replace(theirs.config.device, priority=101)
    assert spec.config == replace(theirs.config, device=device)
    assert spec.flags == {**theirs.flags, "device.priority": "101"}
    assert spec.config_file == theirs.config_file
    assert spec.name == "run-2"
    assert spec.device_id != others[0].spec.device_id
    assert spec.backup == str(others[0].paths.store / "run-2.backup")


def test_the_same_in_other_words_is_no_difference(host: Host) -> None:
    others = host.running(*FIRST, "--secret-file", str(host.secrets[0]), "--frontend", "auto")
    host.spec(
        *("--donors", "10.0.0.3:9400,10.0.0.2", "--secret-file", str(host.secrets[1])),
        *("--frontend", "fuse", "--staging", "16M"),
        others=others,
    )


def test_what_the_configuration_names_counts_as_named(host: Host) -> None:
    host.configure('[cluster]\npeers = ["10.0.0.2"]\n[device]\ntransport = "tcp"\n')
    others = host.running()
    host.spec(others=others)
    host.configure('[cluster]\npeers = ["10.0.0.9"]\n[device]\ntransport = "tcp"\n')
    with pytest.raises(ConflictError, match=r"cluster\.peers differs"):
        host.spec(others=others)
    host.configure('[cluster]\npeers = ["10.0.0.2"]\n[device]\ntransport = "rdma"\n')
    with pytest.raises(ConflictError, match=r"device\.transport differs"):
        host.spec(others=others)


@pytest.mark.parametrize(("theirs", "ours"), [("true", "false"), ("false", "true")])
def test_sealed_and_plain_devices_do_not_stand_beside_each_other(
    host: Host, theirs: str, ours: str
) -> None:
    """Pages of either job would lie on both. A default is no reason to follow a plain one."""
    host.configure(f"[device]\nseal = {theirs}\n")
    others = host.running("--donors", "10.0.0.2")
    assert host.spec(others=others).config.device.seal is (theirs == "true")
    host.configure(f"[device]\nseal = {ours}\n" if ours == "false" else "")
    with pytest.raises(ConflictError, match=rf"device\.seal differs .*: {theirs}\.") as caught:
        host.spec(others=others)
    assert f"seal = {theirs} under [device]" in caught.value.mend


def test_what_the_configuration_names_is_overruled_by_the_option_that_the_error_gives(
    host: Host,
) -> None:
    first = (*FIRST, "--secret-file", str(host.secrets[0]))
    others = host.running(*first)
    host.configure(
        f'[cluster]\npeers = ["10.0.0.9"]\nsecret_file = "{host.secrets[2]}"\n'
        '[device]\ntransport = "rdma"\nfrontend = "ublk"\nslab = "2G"\n'
    )
    given: list[str] = []
    for _ in range(5):
        with pytest.raises(ConflictError) as caught:
            host.spec(*given, others=others)
        mend = caught.value.mend.split()
        assert mend[0] == "Give"
        given += mend[1:3]
    spec = host.spec(*given, others=others)
    theirs = others[0].spec.config
    assert spec.config.cluster.peers == theirs.cluster.peers
    assert spec.config.device.slab_bytes == theirs.device.slab_bytes


def test_a_secret_that_cannot_be_read_is_told_beside_another_run_too(host: Host) -> None:
    others = host.running(*FIRST)
    with pytest.raises(ConfigError, match="/no/such"):
        host.spec("--secret-file", "/no/such", others=others)


def test_a_second_backup_lies_beside_the_first(host: Host) -> None:
    path = str(host.root / "first.backup")
    others = host.running(*FIRST, "--backup", path)
    for argv in ((), ("--backup", path)):
        spec = host.spec(*argv, others=others, name="run-2")
        assert (spec.backup, spec.backup_owned) == (f"{path}.run-2", True)
    # Also when the first has ended, and the name and the file of the first are free again.
    (second,) = others
    device = second.spec.config.device
    paths = rundir.paths_of("run-2", device.run_dir, device.backup_dir)
    left = RunDevice(paths, spec, second.status)
    assert host.spec(others=(left,), name="run-3").backup == f"{path}.run-3"
    assert host.spec(others=(left,)).backup == path


def test_no_backup_beside_no_backup_is_confirmed_by_each(host: Host) -> None:
    none = ("--backup", "none", "--allow-data-loss")
    others = host.running(*FIRST, *none)
    assert host.spec(*none, others=others).backup is None
    with pytest.raises(UsageError, match="--backup none with swap"):
        host.spec("--backup", "none", others=others)


def test_a_block_device_is_no_backup_of_two(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    others = host.running(*FIRST, "--backup", "/dev/vdx")
    monkeypatch.setattr(Path, "is_block_device", lambda path: str(path) == "/dev/vdx")
    with pytest.raises(ConflictError, match="is a block device") as caught:
        host.spec(others=others, name="run-2")
    assert "run --device NAME" in caught.value.mend


def test_a_run_that_has_ended_is_named_by_its_device(host: Host) -> None:
    (other,) = host.running(*FIRST, name="run-2")
    left = RunDevice(other.paths, other.spec, msgspec.structs.replace(other.status, runs=[]))
    with pytest.raises(ConflictError, match=r"\(device run-2 of one that has ended\)"):
        host.spec("--transport", "rdma", others=(left,))


def test_a_run_that_is_alone_keeps_its_own(host: Host) -> None:
    args = parse("--backup", "/mnt/a", "--config", str(host.file))
    config = load_config(args)
    assert inherit.like(args, config, (), "run") == (args, config)
    paths = rundir.paths_of("run", host.root, host.root)
    assert backup_path(args.backup, paths) == "/mnt/a"


def test_the_first_free_name_is_taken(tmp_path: Path) -> None:
    names = []
    locks = []
    for _ in range(3):
        name = beside.free_name(tmp_path, tmp_path)
        locks.append(rundir.take_lock(rundir.paths_of(name, tmp_path, tmp_path)))
        names.append(name)
    assert names == ["run", "run-2", "run-3"]
    os.close(locks[1])
    assert beside.free_name(tmp_path, tmp_path) == "run-2"
    for lock in (locks[0], locks[2]):
        os.close(lock)


def test_names_of_devices_that_are_no_runs_are_not_taken_away_from_them(host: Host) -> None:
    run_dir, store = host.root / "run", host.root / "store"
    store.mkdir()
    assert beside.free_name(run_dir, store) == "run"
    spec = host.spec()
    ours = msgspec.structs.replace(spec, ephemeral=False)
    rundir.write_record(rundir.paths_of("run", run_dir, store).kept, ours)  # stopped
    assert beside.free_name(run_dir, store) == "run-2"
    died = rundir.paths_of("run-2", run_dir, store)
    died.run.mkdir(parents=True)
    spec = msgspec.structs.replace(spec, name="run-2")
    rundir.write_record(died.record, spec)  # of a run: the next one clears it
    assert beside.free_name(run_dir, store) == "run-2"
    rundir.write_record(died.record, msgspec.structs.replace(spec, ephemeral=False))
    assert beside.free_name(run_dir, store) == "run-3"
