# SPDX-License-Identifier: Apache-2.0
"""Who uses a donor's memory, and donors by name: in this process, then with the commands."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import Cluster, Donor
from support.donors.donor_world import IDENTITY, World, client_config, world

from infiniswap.control import messages as m
from infiniswap.control.client import fetch_status

USE = m.LeaseUse(job="prep.py", user="ada", uid=1000, tenant="physics")
TELLING = replace(IDENTITY, use=USE)


async def only_lease(w: World) -> m.LeaseStatus:
    """The donor's one lease, as a client reads it."""
    (found,) = (await fetch_status(w.address, client_config())).leases
    return found


def said(lease: m.LeaseStatus) -> m.LeaseUse:
    """What the device has told."""
    return m.LeaseUse(job=lease.job, user=lease.user, uid=lease.uid, tenant=lease.tenant)


async def test_a_donor_tells_what_a_lease_is_for_and_since_when() -> None:
    before_s = time.time()
    async with world() as w, await w.session(identity=TELLING) as session:
        await session.lease(2)
        lease = await only_lease(w)
        assert said(lease) == USE
        assert not lease.host_certified
        assert lease.granted_unix_s is not None
        assert before_s <= lease.granted_unix_s <= time.time()


async def test_an_older_device_says_nothing_and_borrows_as_ever() -> None:
    async with world() as w, await w.session() as session:  # sends what release 0.1 sends
        granted = await session.lease(2)
        await session.map(granted.lease, 0)
        assert said(await only_lease(w)) == m.LeaseUse()


async def test_a_renewal_tells_it_again_and_one_that_says_nothing_changes_nothing() -> None:
    other = m.LeaseUse(tenant="chemistry")
    async with world(daemon__lease_grace_s=60) as w:
        async with await w.session(identity=TELLING) as session:
            granted = await session.lease(2)
        epoch, since_s = granted.epoch, (await only_lease(w)).granted_unix_s
        for identity, known in (
            (IDENTITY, USE),
            (replace(IDENTITY, use=other), other),
            (IDENTITY, other),
        ):
            async with await w.session(identity=identity) as session:
                epoch = (await session.renew(granted.lease, granted.reclaim, epoch)).epoch
                lease = await only_lease(w)
                assert (said(lease), lease.granted_unix_s) == (known, since_s)


async def test_what_a_device_says_can_forge_no_line() -> None:
    evil = replace(IDENTITY, use=m.LeaseUse(job="a\x1b[2J\r\nERROR b\u202e", tenant="\x9b31m"))
    async with world() as w, await w.session(identity=evil) as session:
        await session.lease(2)
        (kept,) = w.donor.service.table.leases()
        use = kept.record.use
        assert (use.job, use.tenant) == ("a?[2J??ERROR b?", "?31m")


# ---------------------------------------------------------------------- the commands

pytestmark = pytest.mark.requires_native


@pytest.fixture
def sky(cluster: Cluster, secret_file: Path) -> Cluster:
    """Donors named moon and sun, both configured."""
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = ""
    named(cluster, "moon")
    named(cluster, "sun")
    return cluster


def named(cluster: Cluster, name: str) -> Donor:
    """Starts a donor of that name, and configures it as one more."""
    made = cluster.donor("--name", name)
    cluster.env["INFINISWAP_CLUSTER_PEERS"] = cluster.addresses
    return made


def leases(cluster: Cluster, donor: str) -> Any:
    return json.loads(cluster.ok("donor", "leases", donor, "--json"))


def test_commands_find_donors_by_name(sky: Cluster) -> None:
    moon, sun = sky.donors
    assert leases(sky, "sun")["address"] == sun.address
    assert leases(sky, sun.address)["donor_name"] == "sun"
    assert f"Nobody uses memory of moon ({moon.address})" in sky.ok("donor", "leases", "moon")
    assert f"{moon.address} (moon," in sky.ok("donor", "drain", "moon")
    shown = json.loads(sky.ok("status", "--json", "--donors", "sun,moon"))["donors"]
    assert [(row["address"], row["state"]) for row in shown] == [
        (sun.address, "serving"),
        (moon.address, "drained"),
    ]
    assert "lends again" in sky.ok("donor", "undrain", "moon")
    told = json.loads(sky.cli("doctor", "--json", "--donors", "sun").stdout)
    found = [one["what"] for one in told if one["name"] == "donors"]
    assert len(found) == 1
    assert sun.address in found[0]


def test_a_name_of_two_donors_is_refused_with_both_addresses(sky: Cluster) -> None:
    moon, sun = sky.donors
    twin = named(sky, "moon")
    for args in (
        ("donor", "drain", "moon"),
        ("donor", "leases", "moon"),
        ("status", "--donors", "moon"),
    ):
        done = sky.cli(*args)
        assert done.returncode == 2, done
        assert moon.address in done.stderr
        assert twin.address in done.stderr
        assert sun.address not in done.stderr
    for donor in sky.donors:
        assert sky.donor_row(donor)["state"] == "serving"


def test_a_name_of_nobody_is_refused_with_the_known_ones(sky: Cluster) -> None:
    done = sky.cli("donor", "drain", "mon.invalid")
    assert done.returncode == 11, done
    for donor, name in zip(sky.donors, ("moon", "sun"), strict=True):
        assert f"{name} ({donor.address})" in done.stderr
    sky.donors[1].end()
    done = sky.cli("donor", "leases", "no donor of ours")
    assert done.returncode == 11, done
    assert f"Without an answer: {sky.donors[1].address}" in done.stderr


def test_this_hosts_daemon_is_asked_where_no_donor_is_named(sky: Cluster) -> None:
    said = sky.ok("donor", "leases", "--json", INFINISWAP_DAEMON_LISTEN=sky.donors[1].address)
    assert json.loads(said)["donor_name"] == "sun"
    dead = sky.donors[0]
    dead.end()
    done = sky.cli("donor", "leases", INFINISWAP_DAEMON_LISTEN=dead.address)
    assert done.returncode == 6
    assert dead.address in done.stderr
