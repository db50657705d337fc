# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.spec: records of devices, which every release reads, and where they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infiniswap.config import DeviceConfig, MqttConfig, PolicyConfig, load
from infiniswap.device.process.parts import _engine_config
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import (
    check_size,
    completed,
    decode_spec,
    encode_spec,
    with_own_values,
    with_secret_file,
)
from infiniswap.errors import ConfigError, UsageError
from infiniswap.secret import make_host_secret
from infiniswap.units import GIB, MIB, HostPort

RECORD_0_1: dict[str, Any] = {
    "name": "swap0",
    "device_id": "6f7a1bd4-4c65-4a3f-8f83-b54ecbd2d7a2",
    "size_bytes": 8 * GIB,
    "slab_bytes": 64 * MIB,
    "donors": [{"host": "10.0.0.2", "port": 9400}, {"host": "donor3", "port": 9401}],
    "frontend": "fuse",
    "transport": "tcp",
    "backup": "/var/lib/infiniswap/swap0.backup",
    "backup_owned": True,
    "swap": True,
    "priority": 7,
    "ephemeral": False,
    "owner_pid": None,
    "secret_file": "/etc/infiniswap/secret",
    "config": {"frontend": "auto", "slab_bytes": GIB, "request_ms": 500, "run_dir": "/run/isw"},
    "policy": {"choices": 3},
    "ask_s": 1.5,
    "peers_file": "/etc/infiniswap/peers",
    "mqtt": {"broker": {"host": "broker", "port": 0}, "username": "swap"},
    "cluster": "lab",
    "config_file": "/etc/infiniswap/infiniswap.toml",
    "flags": {"device.transport": "tcp"},
    "metrics_token_file": None,
}
"""Fields as a running device of release 0.1 has written them, most of `config` left out."""


def test_a_record_of_release_0_1_is_read() -> None:
    spec = decode_spec(json.dumps(RECORD_0_1).encode(), "here")
    config = spec.config
    # Release 0.1 went by the values beside `config`.
    assert config.device == DeviceConfig(
        frontend="fuse",
        transport="tcp",
        slab_bytes=64 * MIB,
        priority=7,
        request_ms=500,
        run_dir=Path("/run/isw"),
        seal=False,  # it had no seals
    )
    assert config.cluster.peers == (HostPort("10.0.0.2", 9400), HostPort("donor3", 9401))
    assert config.cluster.secret_file == Path("/etc/infiniswap/secret")
    assert config.cluster.peers_file == Path("/etc/infiniswap/peers")
    assert (config.cluster.discovery, config.cluster.name) == ("mqtt", "lab")
    assert config.cluster.ask_s == 1.5
    assert config.mqtt == MqttConfig(broker=HostPort("broker", 0), username="swap")
    assert config.policy == PolicyConfig(choices=3)
    assert spec.slab_count == 128


def test_release_0_1_finds_every_field_in_a_record_of_today() -> None:
    spec = decode_spec(json.dumps(RECORD_0_1).encode(), "here")
    record = json.loads(encode_spec(spec))
    assert decode_spec(encode_spec(spec), "here") == spec
    own = {"device.frontend": "fuse", "device.slab": str(64 * MIB), "device.priority": "7"}
    own["device.seal"] = "false"
    assert record.pop("flags") == {"device.transport": "tcp", **own}
    parts = {**RECORD_0_1["config"], "frontend": "fuse", "slab_bytes": 64 * MIB, "priority": 7}
    assert record.pop("config").items() >= parts.items()
    assert record.pop("policy").items() >= RECORD_0_1["policy"].items()
    assert record.pop("mqtt")["broker"] == RECORD_0_1["mqtt"]["broker"]
    others = RECORD_0_1.keys() - {"flags", "config", "policy", "mqtt"}
    later: dict[str, object] = {"discard_contents": False, "second_secret_file": None}
    later |= {"started_by": {"job": "", "user": "", "uid": None}, "needs_donors": True}
    later |= {"seal": False, "host_key_file": "", "state_dir": "/var/lib/infiniswapd"}
    later |= {"far_bytes": 0}
    later |= dict.fromkeys(("ca_file", "certificate_file", "key_file"))
    assert record == later | {key: RECORD_0_1[key] for key in others}


def test_a_device_finds_its_hosts_own_secret_by_the_directory(tmp_path: Path) -> None:
    """The daemon's user may own that one secret, wherever daemon.state_dir is."""
    make_host_secret(tmp_path)
    config = with_secret_file(load(overrides={"daemon.state_dir": str(tmp_path)}, environ={}))
    spec = msgspec.structs.replace(
        decode_spec(json.dumps(RECORD_0_1).encode(), "here"), config=config
    )
    again = decode_spec(encode_spec(spec), "here").config
    assert again.cluster.secret_file == tmp_path / "host-secret"
    assert again.daemon.state_dir == tmp_path
    assert again.keys() == config.keys() is not None
    # A later configuration says where another daemon would have it: this device keeps its own.
    other = load(overrides={"daemon.state_dir": "/elsewhere"}, environ={})
    assert completed(other, again).keys() == config.keys()
    assert completed(other, again).daemon == again.daemon


def test_a_value_of_the_devices_own_comes_before_the_configuration() -> None:
    spec = decode_spec(json.dumps(RECORD_0_1).encode(), "here")
    again = with_own_values(spec, priority=None, transport="tcp")
    assert again.config.device.priority is None
    assert again.flags == {**spec.flags, "device.priority": "auto"}
    assert with_own_values(again, transport="rdma").flags["device.transport"] == "rdma"


def test_far_memory_lies_behind_the_last_slab_of_the_swap_area() -> None:
    spec = decode_spec(json.dumps(RECORD_0_1).encode(), "here")
    assert (spec.far_bytes, spec.engine_bytes, spec.slab_count) == (0, 8 * GIB, 128)
    whole = msgspec.structs.replace(spec, far_bytes=130 * MIB)
    assert (whole.engine_bytes, whole.slab_count, whole.swap_slabs) == (
        8 * GIB + 130 * MIB,
        131,
        128,
    )
    cut = msgspec.structs.replace(spec, size_bytes=65 * MIB, far_bytes=64 * MIB)
    assert (cut.engine_bytes, cut.slab_count, cut.swap_slabs) == (192 * MIB, 3, 2)
    assert decode_spec(encode_spec(cut), "here") == cut
    engine = _engine_config(cut, -1, -1, standby=False)
    assert (engine.size_bytes, engine.far_bytes) == (192 * MIB, 192 * MIB - 65 * MIB)


def test_a_lease_has_no_more_slabs_than_it_may_with_far_memory() -> None:
    check_size(GIB, MIB, 15 * GIB)
    with pytest.raises(UsageError, match="with 15361M of far memory has 16385 slabs"):
        check_size(GIB, MIB, 15 * GIB + MIB)


@pytest.mark.parametrize("change", [{"size_bytes": 0}, {"donors": "10.0.0.2"}, {"name": None}])
def test_a_damaged_record_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the record of this device cannot be read"):
        decode_spec(json.dumps({**RECORD_0_1, **change}).encode(), "here")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "x" * 33, "a b", "ä"])
def test_bad_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be a device name"):
        rundir.paths_of(name, tmp_path, tmp_path)


def test_a_run_directory_that_is_too_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    with pytest.raises(UsageError, match="longer than") as refused:
        rundir.paths_of("swap0", deep, tmp_path)
    assert refused.value.where.startswith(str(deep))
    assert "shorter" in refused.value.mend
