# SPDX-License-Identifier: Apache-2.0
"""The host key in a TPM: the real systemd-creds, and swtpm as the TPM."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.key_world import World, value
from support.machine.tpms import SoftwareTpm

from infiniswap.device.spec import host_key
from infiniswap.errors import BackupError, UnavailableError
from infiniswap.secret import HOST_KEY_BYTES
from infiniswap.system import tpm

pytestmark = pytest.mark.requires_swtpm


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    machine = SoftwareTpm(tmp_path / "tpm")
    machine.start()
    yield machine
    machine.stop()


@pytest.fixture
def world(tmp_path: Path, machine: SoftwareTpm) -> World:
    (tmp_path / "host").mkdir()
    return World(tmp_path / "host", machine.tpm)


def test_contents_outlive_boots_and_what_an_update_changes_and_their_key_is_nowhere_in_clear(
    world: World, machine: SoftwareTpm, tmp_path: Path
) -> None:
    spec = world.kept()
    sealed = host_key.sealed_path(world.host_file)
    assert host_key.place(world.host_file) == sealed
    machine.boot()
    plain = bytes(machine.tpm.open(sealed.read_bytes(), HOST_KEY_BYTES))
    machine.stop()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        for secret in (plain, world.keys.values[0]):
            assert secret not in path.read_bytes()
    machine.start()
    for pcr in range(16):
        machine.extend(pcr)
    again = world.start(spec)
    assert value(again) == world.keys.values[0]
    world.stop(again, spec)


def test_another_machine_opens_nothing(world: World, machine: SoftwareTpm) -> None:
    spec = world.kept()
    machine.boot("another one")
    with pytest.raises(BackupError, match="the TPM of this host does not open the host key"):
        world.key().begin(world.paths, spec)
    machine.boot()
    assert value(world.start(spec)) == world.keys.values[0]


def test_a_tpm_that_hangs_is_waited_for_in_vain_and_not_at_a_stop(
    tmp_path: Path, world: World, machine: SoftwareTpm
) -> None:
    spec = world.spec()
    running = world.start(spec)
    machine.hang()
    world.stop(running, spec)
    (tmp_path / "other").mkdir()
    hasty = tpm.Tpm(node=tmp_path, device=machine.tpm.device, run_by=(), s_max=0.5)
    other = World(tmp_path / "other", hasty)
    with pytest.raises(UnavailableError, match="did not end within"):
        other.start(other.spec())
    world.tpm = hasty
    with pytest.raises(BackupError, match="did not end within"):
        world.key().begin(world.paths, spec)


def test_a_host_key_moves_into_the_tpm_by_the_commands_that_doctor_names_and_back(
    world: World, machine: SoftwareTpm, project_root: Path
) -> None:
    host_key.make(world.host_file, None)
    spec = world.kept()
    plain, sealed = world.host_file.read_bytes(), host_key.sealed_path(world.host_file)
    for command in host_key.move_command(world.host_file).split(" && "):
        here = command.replace(tpm.NODE, machine.tpm.device)
        subprocess.run(here, shell=True, check=True)
    assert host_key.place(world.host_file) == sealed
    assert plain not in sealed.read_bytes()
    again = world.start(spec)
    assert value(again) == world.keys.values[0]
    world.stop(again, spec)
    assert not world.host_file.exists()
    machine.boot()
    commands = (project_root / "docs/security.md").read_text().partition("cd /var/lib/infiniswap\n")
    back = commands[2].partition("```")[0].replace(tpm.NODE, machine.tpm.device)
    subprocess.run(back, shell=True, check=True, cwd=world.host_file.parent)
    assert world.host_file.read_bytes() == plain
    machine.stop()
    assert value(world.start(spec)) == world.keys.values[0]
