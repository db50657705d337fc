# SPDX-License-Identifier: Apache-2.0
"""What of a changed configuration is taken over at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.configs import configured as made
from support.devices.specs import device_spec

from infiniswap.config import load
from infiniswap.config_changes import Outcome, Process, concerning_keys, live_keys, merged
from infiniswap.device.process import reload
from infiniswap.device.spec.spec import (
    DeviceSpec,
    decode_spec,
    encode_spec,
    source_fields,
    with_own_values,
)
from infiniswap.errors import ConfigError
from infiniswap.policy.headroom import HeadroomConfig, HeadroomPolicy, PoolState
from infiniswap.policy.refill import Refill
from infiniswap.units import HostPort


@pytest.mark.parametrize(
    ("process", "outcome"),
    [
        ("daemon", Outcome(("daemon.headroom",), ("daemon.slab",))),
        ("device", Outcome(("policy.choices",), ("device.hedge_ms",))),
    ],
)
def test_only_live_keys_are_taken_over_and_the_others_wait(
    process: Process, outcome: Outcome
) -> None:
    running = made()
    wanted = made(daemon__slab="64M", daemon__headroom="1G", device__hedge_ms=1, policy__choices=3)
    config = merged(running, wanted, process)
    assert Outcome.between(running, config, wanted, process) == outcome


def test_values_that_go_together_only_after_a_restart_are_refused() -> None:
    wanted = made(daemon__slab="64M", daemon__pool="64M")
    with pytest.raises(ConfigError, match="smaller than one slab"):
        merged(made(), wanted, "daemon")


@pytest.mark.parametrize("process", ["daemon", "device"])
def test_every_live_key_concerns_its_process_and_the_documentation_lists_it(
    process: Process, project_root: Path
) -> None:
    text = (project_root / "docs/configuration.md").read_text(encoding="utf-8")
    section = text[text.index("## Change it while it runs") :].split("\n## ")[0]
    (row,) = re.findall(rf"^\| {process} \| (.*) \|$", section, re.MULTILINE)
    assert tuple(re.findall(r"`(\w+\.\w+)`", row)) == live_keys(process)
    assert set(live_keys(process)) < set(concerning_keys(process))


def test_keys_of_shared_sections_concern_the_processes_that_use_them() -> None:
    daemon, device = set(concerning_keys("daemon")), set(concerning_keys("device"))
    assert {"policy.period_s", "cluster.name", "mqtt.broker"} <= daemon & device
    assert {"daemon.listen", "policy.memory_beta", "cluster.heartbeat_s"} <= daemon - device
    assert {"device.queues", "policy.choices", "cluster.peers", "cluster.ask_s"} <= device - daemon


def test_what_is_said_of_a_reload() -> None:
    assert Outcome(applied=("a.b",)).sentences("device") == []
    (text,) = Outcome(waiting=("a.b", "c.d")).sentences("daemon")
    assert text.endswith("wait for a restart of the daemon: a.b, c.d")
    (text,) = Outcome(waiting=("a.b",), error=ConfigError("no")).sentences("device")
    assert text.endswith("nothing has changed: no")


def started(path: Path, flags: dict[str, str | None]) -> DeviceSpec:
    """A device with that configuration, as its process knows it."""
    spec = device_spec(load(path, flags, {}), **source_fields(str(path), flags))
    return decode_spec(encode_spec(spec), "here")


def test_values_of_a_devices_own_do_not_wait_for_a_start_that_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[device]\nfrontend = "nbd"\nstaging = "8M"\n')
    spec = with_own_values(started(path, {}), frontend="fuse", staging_bytes=16 << 20)
    assert reload.plan(spec) == (spec, Outcome())
    path.write_text('[cluster]\nmetrics_token_file = "/x"\n')
    assert reload.plan(spec)[1] == Outcome(waiting=("cluster.metrics_token_file",))


def test_a_device_reads_its_configuration_again_and_its_flags_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[cluster]\npeers = ["10.0.0.2"]\n[device]\nstaging = "8M"\n')
    spec = started(path, {"device.staging": "16M", "cluster.peers": None})
    assert reload.plan(spec) == (spec, Outcome())
    path.write_text('[cluster]\npeers = ["10.0.0.3"]\n[device]\nrequest_ms = 99\nqueues = 1\n')
    new, outcome = reload.plan(spec)
    assert outcome == Outcome(("device.request_ms", "cluster.peers"), ("device.queues",))
    assert new.config.cluster.peers == (HostPort("10.0.0.3", 9400),)
    device = new.config.device
    assert (device.request_ms, device.queues, device.staging_bytes) == (99, 2, 16 << 20)
    path.write_text("")
    assert reload.plan(spec)[0].config.cluster == spec.config.cluster, "named nowhere is not nobody"
    path.unlink()
    same, outcome = reload.plan(spec)
    assert same is spec
    assert isinstance(outcome.error, ConfigError)


def test_a_pool_with_other_limits_shrinks_to_them() -> None:
    policy = HeadroomPolicy(HeadroomConfig(10, 100, 200))
    policy.observe(0.0, 1000, 800, PoolState(5, 0, 5))
    assert policy.plan(PoolState(5, 0, 5)).grow
    policy.limit(HeadroomConfig(10, 100, 70))
    assert policy.plan(PoolState(5, 0, 5)).release == 3
    with pytest.raises(ValueError, match="slab size"):
        policy.limit(HeadroomConfig(20, 100, 70))


def test_a_refill_whose_rate_becomes_zero_ends() -> None:
    refill = Refill(10.0, 0.0)
    refill.begin(1)
    refill.set_rate(0.0)
    assert not refill
    refill.begin(1)
    assert not refill
    refill.set_rate(5.0)
    refill.begin(1)
    assert refill.slabs == (1,)


def test_one_line_says_all_that_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for outcome, text in (
        (Outcome(), "nothing has changed"),
        (Outcome(("a.b", "c.d")), "a.b, c.d"),
        (Outcome(contents=("it is new",)), "it is new"),
        (Outcome(("a.b",), contents=("it is new",)), "a.b; it is new"),
        (Outcome(waiting=("c.d",), contents=("it is new",)), "it is new"),
    ):
        caplog.clear()
        outcome.log("device")
        assert [line for line in caplog.messages if "reloaded" in line] == [f"reloaded: {text}"]
