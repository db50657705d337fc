# SPDX-License-Identifier: Apache-2.0
"""A cluster changes its secret: two are accepted for a while, sessions and pages go on."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import SLAB, Cluster, Donor
from support.devices.cluster import until as wait_until
from support.devices.nbd_client import bring_to_donor, connected
from support.donors.donor_world import SECRET, WAIT_S, World, client_config, world

from infiniswap.control.client import fetch_status, set_draining
from infiniswap.errors import WrongSecretError
from infiniswap.keys import parse
from infiniswap.secret import new_secret, write_secret

OTHER = new_secret()
OTHER_KEYS = parse(OTHER.encode())


class Files:
    """Two secrets."""

    def __init__(self, directory: Path) -> None:
        self.old, self.new = directory / "old", directory / "new"
        write_secret(self.old, SECRET)
        write_secret(self.new, OTHER)


async def reload(w: World, first: Path, second: Path | None) -> None:
    """As by SIGHUP, with these files configured."""
    before = w.donor.service.config
    cluster = replace(before.cluster, secret_file=first, second_secret_file=second)
    outcome = await w.donor.reloader.reload(lambda: replace(before, cluster=cluster))
    assert outcome.error is None
    assert outcome.waiting == ()


async def test_two_secrets_are_accepted_and_open_sessions_go_on(tmp_path: Path) -> None:
    files = Files(tmp_path)
    now_s = 0.0
    asked_with = {"old": client_config(), "new": client_config(keys=OTHER_KEYS)}
    async with world(clock=lambda: now_s) as w, asyncio.timeout(WAIT_S), await w.session() as open_:
        lease = await open_.lease(2)

        async def idle_s(secret: str) -> float | None:
            return (await fetch_status(w.address, asked_with[secret])).second_secret_idle_s

        with pytest.raises(WrongSecretError):
            await idle_s("new")
        assert await idle_s("old") is None
        # 1. Every host accepts both.
        await reload(w, files.old, files.new)
        assert await idle_s("old") == 0
        now_s = 30.0
        assert await idle_s("old") == 30
        # 2. Every host uses the new one; the old one is still accepted.
        await reload(w, files.new, files.old)
        now_s = 70.0
        assert await idle_s("new") == 40
        await w.session()
        now_s = 75.0
        assert await idle_s("new") == 5
        told = await fetch_status(w.address, asked_with["new"])
        assert any("device swap0 on consumer used it last, 5 s ago" in s for s in told.degraded)
        assert (await set_draining(w.address, asked_with["new"], True)).draining
        now_s = 80.0
        assert not (await set_draining(w.address, asked_with["old"], False)).draining
        told = await fetch_status(w.address, asked_with["new"])
        assert told.second_secret_idle_s == 0
        assert any("a command at 127.0.0.1:" in s for s in told.degraded)
        # 3. The old one is retired.
        await reload(w, files.new, None)
        assert await idle_s("new") is None
        with pytest.raises(WrongSecretError):
            await idle_s("old")
        with pytest.raises(WrongSecretError):
            await w.session()
        # The session of the beginning has seen none of it.
        await open_.map(lease.lease, 0)
        assert open_.ended is None


async def test_other_contents_under_the_same_name_are_read_by_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path, SECRET)
    async with world(cluster__secret_file=path) as w:
        await fetch_status(w.address, client_config())
        path.unlink()
        write_secret(path, OTHER)
        await reload(w, path, None)
        await fetch_status(w.address, client_config(keys=OTHER_KEYS))


@pytest.mark.parametrize("text", ["", "session-key:" + "ab" * 32, "password"])
async def test_a_second_secret_that_cannot_be_used_changes_nothing(
    tmp_path: Path, text: str
) -> None:
    bad = tmp_path / "bad"
    write_secret(bad, text)
    async with world() as w:
        config = w.donor.service.config
        cluster = replace(config.cluster, second_secret_file=bad)
        outcome = await w.donor.reloader.reload(lambda: replace(config, cluster=cluster))
        assert outcome.error is not None
        assert str(bad) in str(outcome.error)
        assert (await fetch_status(w.address, client_config())).second_secret_idle_s is None


# -------------------------------------------------------------------- daemon and device


class Both:
    """One configuration file, which a daemon and a device read."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.file = cluster.root / "infiniswap.toml"
        self.secrets = {name: cluster.root / name for name in ("old", "new")}
        for path in self.secrets.values():
            write_secret(path, new_secret())
        cluster.env["INFINISWAP_CONFIG"] = str(self.file)
        self.write("old")

    def write(self, first: str, second: str = "") -> None:
        lines = ["[cluster]", f'secret_file = "{self.secrets[first]}"']
        if second:
            lines.append(f'second_secret_file = "{self.secrets[second]}"')
        self.file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def reload(self, donor: Donor, device: str) -> None:
        count = donor.log.count("secrets of the cluster have changed")
        donor.send(signal.SIGHUP)
        wait_until(
            lambda: donor.log.count("secrets of the cluster have changed") > count,
            "the daemon's reload",
        )
        self.cluster.ok("device", "reload", device)


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.parametrize("standby", ["off", "on"])
def test_daemon_and_device_change_to_another_secret(cluster: Cluster, standby: str) -> None:
    both = Both(cluster)
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = standby
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "60"
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
    donor = cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size=str(SLAB))
    data = os.urandom(4096)
    with connected(device.socket) as client:
        bring_to_donor(device, client, data)
        for first, second in (("old", "new"), ("new", "old"), ("new", "")):
            both.write(first, second)
            both.reload(donor, device.name)
            assert nbd.read(client, 0, 4096) == data
        assert int(device.status["donors"][0]["reclaimed"]) == 0  # the session went on
        # A session that is opened from now on takes the new one.
        donor.end()
        cluster.successor(donor)
        wait_until(lambda: int(device.status["donors"][0]["given_up"]) > 0, "the lease's end")
        bring_to_donor(device, client, data)
        assert nbd.read(client, 0, 4096) == data
        assert device.status["stats"]["requests_failed"] == 0
        client.sendall(nbd.request(nbd.DISC))


@pytest.mark.requires_native
@pytest.mark.requires_root
def test_a_standby_takes_over_with_the_new_secret(cluster: Cluster) -> None:
    both = Both(cluster)
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "60"
    donor = cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size=str(SLAB))
    data = os.urandom(4096)
    with connected(device.socket) as client:
        bring_to_donor(device, client, data)
        for first, second in (("old", "new"), ("new", "old"), ("new", "")):
            both.write(first, second)
            both.reload(donor, device.name)
        client.sendall(nbd.request(nbd.DISC))
    pid = device.status["pid"]
    os.kill(pid, signal.SIGKILL)
    device.wait_take_over(1)
    wait_until(lambda: int(device.status["donors"][0]["reclaimed"]) > 0, "the lease to be back")


@pytest.mark.requires_native
@pytest.mark.requires_root
def test_a_standby_that_finds_the_secret_broken_uses_what_its_predecessor_did(
    cluster: Cluster,
) -> None:
    both = Both(cluster)
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size=str(SLAB))
    data = os.urandom(4096)
    with connected(device.socket) as client:
        bring_to_donor(device, client, data)
        client.sendall(nbd.request(nbd.DISC))
    good = both.secrets["old"].read_text()
    both.secrets["old"].write_text(good[:10])
    device.wait_take_over_by_another_standby()
    wait_until(lambda: int(device.status["donors"][0]["reclaimed"]) > 0, "the lease to be back")
    assert any("secret cannot be used" in text for text in device.status["degraded"])
    both.secrets["old"].write_text(good)
    cluster.ok("device", "reload", device.name)
    assert not any("secret" in text for text in device.status["degraded"])
