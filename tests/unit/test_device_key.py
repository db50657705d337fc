# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.spec.device_key: a device's key from its start to its end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.devices.key_world import World, value
from support.devices.seal_keys import KEY_BYTES, SEALED_BYTES

from infiniswap.device.spec import contents
from infiniswap.device.spec.device_key import DeviceKey
from infiniswap.device.spec.spec import encode_spec
from infiniswap.engine.seal import SEALED_KEY_BYTES
from infiniswap.errors import BackupError, ConfigError, EngineError, UnavailableError
from infiniswap.secret import HOST_KEY_BYTES


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("changes", [{"swap": True}, {"ephemeral": True}, {"backup": None}])
def test_a_key_that_nothing_is_kept_with_is_never_written(
    world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    spec = world.spec(**changes)
    key = world.start(spec)
    made = value(key)
    assert made == world.keys.values[0]
    assert not world.paths.key.exists()
    assert not world.host_file.exists()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or made not in path.read_bytes()
    key.forget()


def test_its_end_is_everybodys_who_has_it(world: World) -> None:
    key, standby = world.start(world.spec(swap=True)), DeviceKey(world.keys)
    standby.inherit(key.fd, world.paths, world.spec(swap=True))
    assert standby.fd != key.fd
    assert value(standby) == value(key) == world.keys.values[0]
    assert not os.get_inheritable(standby.fd)
    closed = key.fd
    key.forget()
    key.forget()
    assert value(standby) == bytes(KEY_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(closed)
    standby.close()
    standby.close()
    assert standby.fd == -1


def test_a_successor_without_a_key_is_none(world: World) -> None:
    standby = DeviceKey(world.keys)
    with pytest.raises(EngineError, match="left no key") as caught:
        standby.inherit(-1, world.paths, world.spec())
    assert caught.value.code == errno.ENOKEY
    standby.inherit(-1, world.paths, world.spec(seal=False))


def test_what_is_kept_is_sealed_with_the_hosts_key(world: World) -> None:
    spec = world.spec()
    first = world.start(spec)
    made = value(first)
    # Already now: that it cannot be written is no news for a stop.
    assert len(world.paths.key.read_bytes()) == SEALED_BYTES
    assert mode(world.paths.key) == mode(world.host_file) == 0o600
    host_key = world.host_file.read_bytes()
    assert len(host_key) == HOST_KEY_BYTES
    world.stop(first, spec)
    for path in (world.paths.key, world.paths.kept, world.host_file):
        assert made not in path.read_bytes()
    assert made not in encode_spec(spec)
    again = world.start(spec)
    assert value(again) == made
    assert world.host_file.read_bytes() == host_key
    # The host's key is overwritten in memory as soon as it was used.
    assert len(world.keys.host_keys) >= 3
    assert not any(any(seen) for seen in world.keys.host_keys)
    again.forget()
    contents.delete(world.paths, spec)
    assert not world.paths.key.exists()
    assert world.host_file.exists()


def test_blocks_of_a_key_that_is_not_kept_any_longer_hold_nothing(world: World) -> None:
    """An open file stands for its blocks."""
    spec = world.spec()
    world.stop(world.start(spec), spec)
    with world.paths.key.open("rb") as first:
        assert any(first.read())
        world.stop(world.start(spec), spec)  # the same key, sealed once more
        assert os.pread(first.fileno(), SEALED_BYTES, 0) == bytes(SEALED_BYTES)
    with world.paths.key.open("rb") as second:
        assert any(second.read())
        contents.delete(world.paths, spec)
        assert os.pread(second.fileno(), SEALED_BYTES, 0) == bytes(SEALED_BYTES)


def test_a_key_with_another_name_keeps_what_it_holds(world: World, tmp_path: Path) -> None:
    """Somebody's copy by a link."""
    spec = world.spec()
    world.stop(world.start(spec), spec)
    sealed = world.paths.key.read_bytes()
    os.link(world.paths.key, tmp_path / "copy")
    contents.delete(world.paths, spec)
    assert (tmp_path / "copy").read_bytes() == sealed


def test_a_stop_writes_what_was_lost_meanwhile(world: World) -> None:
    spec = world.spec()
    first = world.start(spec)
    made = value(first)
    world.paths.key.unlink()
    world.host_file.unlink()
    world.stop(first, spec)
    again = world.start(spec)
    assert value(again) == made
    again.close()


def test_a_start_that_begins_with_zeros_has_another_key(world: World) -> None:
    kept = world.kept()
    sealed = world.paths.key.read_bytes()
    discarding = world.spec(discard_contents=True)
    # As long as the start may fail, what is kept can be read.
    failed = DeviceKey(world.keys)
    failed.begin(world.paths, discarding)
    failed.forget()
    assert world.paths.key.read_bytes() == sealed
    again = world.start(kept)
    assert value(again) == world.keys.values[0]
    world.stop(again, kept)
    other = world.start(discarding)
    assert value(other) != world.keys.values[0]
    assert world.paths.key.read_bytes() != sealed
    other.forget()
    plain = world.start(world.spec(discard_contents=True, seal=False))
    assert plain.fd == -1
    assert not world.paths.key.exists()


def altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "file", "error", "words"),
    [
        (Path.unlink, "key", BackupError, ("No such file", "Restore that file")),
        (altered, "key", BackupError, ("altered", "Restore both files")),
        (shorter, "key", BackupError, ("altered", "Restore both files")),
        (Path.unlink, "host", BackupError, ("host's key is gone", "Restore that file")),
        (altered, "host", BackupError, ("another key", "Restore both files")),
        (shorter, "host", ConfigError, ("31 bytes, not 32", "Restore that file")),
        (lambda path: path.chmod(0o640), "host", ConfigError, ("mode 0640", "chmod 600")),
    ],
)
def test_what_is_kept_and_cannot_be_opened_is_refused_with_a_way_out(
    world: World, harm: Any, file: str, error: type[Exception], words: tuple[str, ...]
) -> None:
    spec = world.kept()
    path = world.paths.key if file == "key" else world.host_file
    harm(path)
    key = DeviceKey(world.keys)
    with pytest.raises(error) as caught:
        key.begin(world.paths, spec)
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert key.fd == -1
    assert world.paths.tables.exists()
    if error is BackupError:
        assert "--discard-contents" in str(caught.value)


def test_a_hosts_key_that_others_may_read_is_refused_before_it_is_used(world: World) -> None:
    world.host_file.parent.mkdir(exist_ok=True)
    world.host_file.write_bytes(os.urandom(HOST_KEY_BYTES))
    world.host_file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read"):
        DeviceKey(world.keys).begin(world.paths, world.spec())
    if os.geteuid() == 0:
        world.host_file.chmod(0o600)
        os.chown(world.host_file, 4711, -1)
        with pytest.raises(ConfigError, match="another user"):
            DeviceKey(world.keys).begin(world.paths, world.spec())


def test_without_a_library_there_is_no_start_and_no_standby(world: World) -> None:
    world.keys.has_library = False
    key = DeviceKey(world.keys)
    with pytest.raises(UnavailableError, match="no library"):
        key.begin(world.paths, world.spec(swap=True))
    with pytest.raises(UnavailableError, match="no library"):
        key.inherit(0, world.paths, world.spec(swap=True))
    assert key.fd == -1
    DeviceKey(world.keys).begin(world.paths, world.spec(seal=False))


def test_what_is_not_sealed_is_told(world: World) -> None:
    key = DeviceKey(world.keys)
    assert key.degraded(world.spec()) == []
    (said,) = key.degraded(world.spec(seal=False))
    assert said.startswith("seal: ")
    assert "seal = true under [device]" in said
    (said,) = key.degraded(world.spec(seal=False, flags={"device.seal": "false"}))
    assert "infiniswap device remove d" in said
    key.tended(is_used_up=True)
    (said,) = key.degraded(world.spec())
    assert said.startswith("seal-keys: ")
    key.tended(is_used_up=False)
    assert key.degraded(world.spec()) == []


@pytest.mark.requires_native
def test_the_librarys_keys_go_the_same_way(world: World) -> None:
    """Their bytes cannot be looked at here: they are compared by what they open."""
    from infiniswap.engine.native_seal import NativeSealKeys

    native: Any = NativeSealKeys()
    world.keys = native
    spec = world.spec()
    first = world.start(spec)
    assert first.library
    assert len(world.paths.key.read_bytes()) == SEALED_KEY_BYTES
    world.stop(first, spec)
    again = world.start(spec)
    again.keep(world.paths, spec)
    again.forget()
    world.paths.tables.write_bytes(b"tables")
    altered(world.paths.key)
    with pytest.raises(BackupError, match="altered"):
        DeviceKey(native).begin(world.paths, spec)
