# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.spec.host_key: in the TPM, in a file, and on the way from one to the other."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from support.devices.key_world import World, value
from support.machine.tpms import StandIn

from infiniswap.device.spec import host_key
from infiniswap.errors import BackupError, UnavailableError
from infiniswap.secret import HOST_KEY_BYTES
from infiniswap.system import tpm


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "tpm")


@pytest.fixture
def world(tmp_path: Path, stand_in: StandIn) -> World:
    return World(tmp_path, stand_in.tpm)


@pytest.fixture
def sealed_file(world: World) -> Path:
    return host_key.sealed_path(world.host_file)


def test_a_new_host_key_is_stored_sealed_only(
    world: World, stand_in: StandIn, sealed_file: Path, tmp_path: Path
) -> None:
    spec = world.spec()
    first = world.start(spec)
    made = value(first)
    assert stat.S_IMODE(sealed_file.stat().st_mode) == 0o600
    plain = bytes(stand_in.tpm.open(sealed_file.read_bytes(), HOST_KEY_BYTES))
    world.stop(first, spec)
    assert not world.host_file.exists()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert plain not in path.read_bytes()
        assert plain.hex() not in path.read_text(errors="replace")
        assert made not in path.read_bytes()
    again = world.start(spec)
    assert value(again) == made
    assert not any(any(seen) for seen in world.keys.host_keys)
    for call in stand_in.calls:
        assert f"--tpm2-device={tpm.NODE}" in json.loads(call)
        assert plain.hex() not in call


def test_a_stop_asks_no_tpm_neither_does_a_successors(world: World, stand_in: StandIn) -> None:
    spec = world.spec()
    first = world.start(spec)
    made, asked = value(first), len(stand_in.calls)
    stand_in.falls_ill("decrypt hangs")
    standby, next_one = world.key(), world.key()
    standby.inherit(first.fd, world.paths, spec)
    next_one.inherit(standby.fd, world.paths, spec)
    for process in (first, standby, next_one):
        world.paths.key.unlink()
        process.keep(world.paths, spec)
    assert len(stand_in.calls) == asked
    world.stop(next_one, spec)
    stand_in.falls_ill("")
    assert value(world.start(spec)) == made


def test_a_stop_seals_anew_where_the_host_key_was_exchanged(
    world: World, sealed_file: Path
) -> None:
    """As the remedy says for a TPM that was cleared; this device had its key from before."""
    spec = world.spec()
    first = world.start(spec)
    made = value(first)
    sealed_file.unlink()
    host_key.make(world.host_file, world.tpm)
    standby = world.key()
    standby.inherit(first.fd, world.paths, spec)
    world.stop(standby, spec)
    assert value(world.start(spec)) == made


def test_a_stop_whose_host_key_is_gone_makes_one_without_waiting_for_the_tpm(
    world: World, stand_in: StandIn, sealed_file: Path
) -> None:
    spec = world.spec()
    first = world.start(spec)
    made, asked = value(first), len(stand_in.calls)
    sealed_file.unlink()
    world.stop(first, spec)
    assert len(stand_in.calls) == asked
    assert world.host_file.exists()
    assert value(world.start(spec)) == made


def test_a_stop_that_needs_the_tpm_after_all_is_refused_and_loses_nothing(
    world: World, stand_in: StandIn
) -> None:
    spec = world.spec()
    first, standby = world.start(spec), world.key()
    made = value(first)
    world.paths.key.unlink()
    standby.inherit(first.fd, world.paths, spec)
    stand_in.falls_ill("decrypt says no")
    with pytest.raises(BackupError, match="does not open the host key"):
        standby.keep(world.paths, spec)
    assert value(standby) == made
    stand_in.falls_ill("")
    world.stop(standby, spec)
    assert value(world.start(spec)) == made


def test_a_host_key_in_a_file_stays_in_use(world: World, stand_in: StandIn) -> None:
    host_key.make(world.host_file, None)
    spec = world.kept()
    again = world.start(spec)
    assert value(again) == world.keys.values[0]
    assert stand_in.calls == []
    assert not host_key.is_in_tpm(world.host_file)


def test_without_a_tpm_the_host_key_is_in_a_file(world: World, stand_in: StandIn) -> None:
    stand_in.falls_ill("encrypt says TPM2 support not installed: Operation not supported")
    world.start(world.spec())
    assert len(world.host_file.read_bytes()) == HOST_KEY_BYTES
    assert host_key.place(world.host_file) == world.host_file


def test_what_a_release_seals_and_cannot_open_is_not_used(
    world: World, stand_in: StandIn, sealed_file: Path
) -> None:
    stand_in.falls_ill("252")
    spec = world.spec()
    world.stop(world.start(spec), spec)
    assert sealed_file.read_text().startswith("--tpm2-pcrs=23 ")
    assert value(world.start(spec)) == world.keys.values[0]


@pytest.mark.parametrize(
    ("ill", "words"),
    [
        ("encrypt says TPM in lockout", "encrypt: first a line of a library; TPM in lockout"),
        ("decrypt says TPM in lockout", "decrypt: first a line of a library; TPM in lockout"),
        ("encrypt gives garbage", "systemd-creds decrypt: "),
        ("decrypt gives garbage", "not 32 bytes"),
        ("decrypt gives other bytes", "what it seals does not open"),
        ("encrypt hangs", "did not end within 0.5 s"),
    ],
)
def test_a_tpm_that_seals_nothing_is_told_with_a_way_out(
    world: World, stand_in: StandIn, sealed_file: Path, ill: str, words: str
) -> None:
    if "hangs" in ill:
        world.tpm = stand_in.hasty
    stand_in.falls_ill(ill)
    with pytest.raises(UnavailableError) as caught:
        world.start(world.spec())
    said = str(caught.value)
    assert said.startswith("/dev/tpmrm0: the TPM of this host cannot seal the host key: ")
    assert words in said
    assert host_key.place(world.host_file) is None
    assert not world.paths.kept.exists()
    way_out = said.partition("in a file: ")[2]
    subprocess.run(way_out, shell=True, check=True)
    assert host_key.place(world.host_file) == world.host_file
    world.start(world.spec())


@pytest.mark.parametrize(
    ("ill", "words"),
    [
        ("decrypt says TPM in lockout", "TPM in lockout"),
        ("decrypt gives garbage", "not 32 bytes"),
        ("decrypt hangs", "did not end within 0.5 s"),
        ("another machine", "State not recoverable"),
    ],
)
def test_a_host_key_that_does_not_open_is_told_before_anything_is_attached(
    world: World, stand_in: StandIn, sealed_file: Path, ill: str, words: str
) -> None:
    spec, well = world.kept(), world.tpm
    if "hangs" in ill:
        world.tpm = stand_in.hasty
    stand_in.falls_ill(ill)
    if ill == "another machine":
        stand_in.is_on_machine("two")
    for other in (spec, world.spec(discard_contents=True)):
        key = world.key()
        with pytest.raises(BackupError) as caught:
            key.begin(world.paths, other)
        for word in (str(sealed_file), words, "--discard-contents", "another machine"):
            assert word in str(caught.value)
        key.close()
    assert world.paths.tables.exists()
    # Nothing was lost by that.
    world.tpm = well
    stand_in.falls_ill("")
    if ill != "another machine":
        again = world.start(spec)
        assert value(again) == world.keys.values[0]
        return
    # And what the sentence says helps.
    command = str(caught.value).partition("with zeros: ")[2].partition(", then")[0]
    subprocess.run(shlex.split(command), check=True)
    assert world.start(world.spec(discard_contents=True)).fd >= 0


def test_a_sealed_host_key_that_others_may_exchange_is_refused(
    world: World, sealed_file: Path
) -> None:
    spec = world.kept()
    sealed_file.chmod(0o666)
    with pytest.raises(Exception, match="other users may change it"):
        world.key().begin(world.paths, spec)
