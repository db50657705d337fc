# SPDX-License-Identifier: Apache-2.0
"""Draining a donor: in this process, then with the command on real ones."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from support.devices.cluster import WAIT_S, Cluster, Donor
from support.devices.cluster import until as wait_until
from support.donors.donor_world import Handler, client_config, refusal, until, world

from infiniswap.config import DeviceConfig
from infiniswap.control import messages as m
from infiniswap.control.client import Identity, connect, fetch_status, set_draining
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.errors import ProtocolMismatchError, WrongSecretError
from infiniswap.keys import derive
from infiniswap.units import MIB, parse_host_port


async def test_every_slab_comes_back_and_none_is_lent_until_undrain() -> None:
    async with world() as w:
        handler = Handler()
        async with await w.session(handler) as session:
            lease = await session.lease(8)
            for slab in range(5):
                await session.map(lease.lease, slab)
            info = await set_draining(w.address, client_config(), True)
            assert info.draining
            await until(lambda: w.store.stats()["slabs_mapped"] == 0)
            assert len(handler.evicted) == 5
            assert handler.drains == [True]
            for request in (session.map(lease.lease, 0), session.lease(1)):
                assert await refusal(request) == m.REFUSED_DRAINING
            assert not (await set_draining(w.address, client_config(), False)).draining
            await session.map(lease.lease, 0)
            assert handler.drains == [True, False]


async def test_a_consumer_without_a_backup_keeps_its_slab_and_the_others_go() -> None:
    async with world() as w:
        fragile = Handler()
        fragile.has_backup = False
        async with await w.session(fragile) as session, await w.session() as other:
            for borrower in (session, other):
                lease = await borrower.lease(1)
                await borrower.map(lease.lease, 0)
            await set_draining(w.address, client_config(), True)
            await until(lambda: w.store.stats()["slabs_mapped"] == 1)
            fragile.has_backup = True
            # It is asked again when it may have changed its mind: see EvictionConfig.refused_s.
            assert w.donor.service.counters["evictions_refused"] >= 1


async def test_a_drain_by_force_takes_only_copies_too() -> None:
    async with world() as w:
        hostile = Handler()
        hostile.has_backup = False
        async with await w.session(hostile) as session:
            lease = await session.lease(8)
            for slab in range(5):
                await session.map(lease.lease, slab)
            await set_draining(w.address, client_config(), True)
            await until(lambda: w.donor.service.counters["evictions_refused"] >= 5)
            assert w.store.stats()["slabs_mapped"] == 5
            await set_draining(w.address, client_config(), True, force=True)
            await until(lambda: w.store.stats()["slabs_mapped"] == 0)
            assert hostile.last_copies == 5


async def test_an_older_donor_is_not_drained_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        monkeypatch.setattr(m, "DRAIN_FORCE_PATH", "/v1/drain/later")
        with pytest.raises(ProtocolMismatchError, match="earlier release, which cannot drain"):
            await set_draining(w.address, client_config(), True, force=True)
        assert not w.donor.service.drain.is_active


async def test_a_wish_that_is_not_authorized_is_refused(secret_file: Path) -> None:
    async with world(cluster__secret_file=secret_file) as w:
        for keys in (None, derive(b"quite another secret")):
            with pytest.raises(WrongSecretError):
                await set_draining(w.address, client_config(keys=keys), True)
        assert not w.donor.service.drain.is_active
        assert (await set_draining(w.address, client_config(), True)).draining


async def test_where_it_cannot_be_kept_the_answer_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    async with world(daemon__state_dir=blocked) as w:  # its port is the system's choice
        info = await set_draining(w.address, client_config(), True)
        assert info.draining
        assert "after a restart" in info.warning
        assert (await fetch_status(w.address, client_config())).draining


async def test_a_device_that_has_no_slab_there_finds_out_that_the_drain_is_over() -> None:
    nothing = cast(Any, None)
    async with world() as w:
        identity = Identity("00000000-0000-0000-0000-00000000000d", "swap9", "consumer")
        config = LinkConfig(
            identity=identity,
            client=client_config(),
            device=DeviceConfig(transport="tcp", slab_bytes=MIB),
            suspend_s=1.0,
            slab_count=4,
            has_backup=True,
        )
        with ThreadPoolExecutor(1) as executor:
            link = DonorLink(w.address, nothing, nothing, config, executor)
            await set_draining(w.address, client_config(), True)
            assert ((await link.ask()).slabs_mappable, link.is_usable) == (0, False)
            await link.let_go()
            await set_draining(w.address, client_config(), False)
            # Nobody is left who could tell it, so it has to be worth asking.
            assert link.is_usable
            assert (await link.ask()).slabs_mappable > 0
            await link.close()


pytestmark = pytest.mark.requires_native


@pytest.fixture
def cluster(cluster: Cluster, secret_file: Path) -> Cluster:
    """With the secret of the test cluster."""
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    return cluster


def hold(donor: Donor, count: int, has_backup: bool) -> asyncio.Task[None]:
    async def work() -> None:
        handler = Handler()
        handler.has_backup = has_backup
        identity = Identity("00000000-0000-0000-0000-00000000000c", "swap7", "consumer")
        address = parse_host_port(donor.address)
        async with await connect(address, identity, client_config(), handler) as session:
            lease = await session.lease(8)
            for slab in range(count):
                await session.map(lease.lease, slab)
            await session.wait_ended()

    return asyncio.create_task(work())


async def command(cluster: Cluster, *args: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(cluster.cli, "donor", *args)


async def mapped(donor: Donor) -> int:
    status = await fetch_status(parse_host_port(donor.address), client_config())
    return status.pool.slabs_mapped


async def until_mapped(donor: Donor, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await mapped(donor) != count:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)


def who(cluster: Cluster, donor: Donor) -> str:
    """As the command names it: an address may lead to another donor than meant."""
    status = cluster.donor_row(donor)["status"]
    return f"{donor.address} ({status['donor_name']}, {status['donor_id']})"


async def test_the_command_waits_until_it_is_done_and_a_restart_forgets_nothing(
    cluster: Cluster,
) -> None:
    ended = await asyncio.to_thread(cluster.donor)
    await asyncio.to_thread(ended.end)
    donor = await asyncio.to_thread(cluster.successor, ended)  # with a port that stays its own
    holder = hold(donor, 3, True)
    await until_mapped(donor, 3)
    done = await command(cluster, "drain", donor.address)
    assert done.returncode == 0, done.stderr
    assert "is drained: 3 slabs (24.0 MiB)" in done.stdout
    assert await mapped(donor) == 0
    await asyncio.to_thread(donor.end)
    await holder
    restarted = await asyncio.to_thread(cluster.successor, donor)
    assert "still draining" in restarted.log
    assert "drained" in cluster.ok("status", "--donors", restarted.address)
    done = await command(cluster, "undrain", restarted.address)
    named = who(cluster, restarted)
    assert (done.returncode, done.stdout) == (0, f"{named} lends again\n")
    await asyncio.to_thread(restarted.end)
    again = await asyncio.to_thread(cluster.successor, restarted)
    assert "still draining" not in again.log


def test_a_device_that_starts_says_which_donor_lends_nothing(cluster: Cluster) -> None:
    donor = cluster.donor()
    start = ["device", "start", cluster.name(), "--donors", donor.address, "--size", "64M"]
    start += ["--frontend", "nbd-socket"]
    cluster.ok("donor", "drain", donor.address)
    done = cluster.cli(*start)
    assert done.returncode == 0, done.stderr
    assert f"donor {donor.address} is draining and lends nothing" in done.stderr
    assert f"`infiniswap donor undrain {donor.address}`" in done.stderr
    cluster.ok("device", "remove", start[2])
    cluster.ok("donor", "undrain", donor.address)
    done = cluster.cli(*start)
    assert done.returncode == 0, done.stderr
    assert "lends nothing" not in done.stderr


async def test_the_command_takes_only_copies_by_force_alone(cluster: Cluster) -> None:
    donor = await asyncio.to_thread(cluster.donor)
    holder = hold(donor, 1, False)
    await until_mapped(donor, 1)
    assert (await command(cluster, "drain", "--no-wait", donor.address)).returncode == 0
    await asyncio.to_thread(wait_until, lambda: "[slab-kept]" in donor.log, "a refusal")
    done = await command(cluster, "drain", "--force", donor.address)
    assert done.returncode == 0, done.stderr
    assert f"{who(cluster, donor)} is drained: 1 slab (8.00 MiB) given back" in done.stdout
    assert "[last-copy-taken]" in donor.log
    await asyncio.to_thread(donor.end)
    await holder


async def test_an_interrupted_command_does_not_end_the_drain(cluster: Cluster) -> None:
    donor = await asyncio.to_thread(cluster.donor)
    holder = hold(donor, 2, False)
    await until_mapped(donor, 2)
    process = await asyncio.create_subprocess_exec(
        *(*cluster.program, "donor", "drain", donor.address),
        env=cluster.env,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    await asyncio.to_thread(wait_until, lambda: "asks for drain" in donor.log, "the drain")
    await asyncio.to_thread(wait_until, lambda: "[slab-kept]" in donor.log, "a refusal")
    process.send_signal(signal.SIGINT)
    said = (await asyncio.wait_for(process.communicate(), WAIT_S))[1].decode()
    assert process.returncode == 130
    # The one or the other: the donor may have refused before the command had heard its answer.
    assert "keeps draining; `undrain` ends" in said or "may have begun to drain; `undrain`" in said
    assert "Traceback" not in said
    done = await command(cluster, "drain", "--no-wait", donor.address)
    assert (done.returncode, done.stdout) == (
        0,
        f"{who(cluster, donor)} drains: 2 slabs are still lent\n",
    )
    await command(cluster, "undrain", donor.address)
    await asyncio.to_thread(donor.end)
    await holder


def test_mistakes_are_one_clear_error(cluster: Cluster) -> None:
    for args, code, text in (
        (("drain", "127.0.0.1:1"), 6, "127.0.0.1:1"),
        (("drain", "no such host!"), 2, "HOST:PORT"),
    ):
        done = cluster.cli("donor", *args)
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
