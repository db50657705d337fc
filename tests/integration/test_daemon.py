# SPDX-License-Identifier: Apache-2.0
"""`infiniswap daemon` and `infiniswap status` as real processes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, Donor, environment

from infiniswap.control import messages as m
from infiniswap.control.channel import LOST
from infiniswap.control.client import (
    ClientConfig,
    Identity,
    QuietHandler,
    Session,
    connect,
    fetch_status,
)
from infiniswap.errors import NoDonorError
from infiniswap.units import MIB, HostPort, parse_host_port

pytestmark = pytest.mark.requires_native

IDENTITY = Identity("00000000-0000-0000-0000-00000000000b", "swap0", "consumer")


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    """Whose daemons keep nothing over a restart."""
    cluster.env |= {
        "INFINISWAP_DAEMON_RUN_DIR": "",
        "INFINISWAP_DAEMON_LEASE_GRACE_S": "0.5",
        "INFINISWAP_CLUSTER_HEARTBEAT_S": "0.2",
        "INFINISWAP_POLICY_PERIOD_S": "0.1",
    }
    return cluster


def start(cluster: Cluster, *args: str, port: int = 0) -> Donor:
    return cluster.donor("--slab", "1M", *args, pool="16M", port=port)


@pytest.fixture
def daemon(cluster: Cluster) -> Donor:
    return start(cluster)


def control(daemon: Donor) -> HostPort:
    return parse_host_port(daemon.address)


async def session_with(daemon: Donor) -> Session:
    config = ClientConfig(connect_s=WAIT_S, request_s=WAIT_S)
    return await connect(control(daemon), IDENTITY, config, QuietHandler(), slab_bytes=MIB)


def uri(daemon: Donor, token: str) -> str:
    return f"nbd://127.0.0.1:{daemon.data}/{token}"


def system_environment() -> dict[str, str]:
    """nbdsh takes the first python3 on PATH; its module belongs to the distribution's."""
    return {**environment(), "PATH": f"/usr/bin:/bin:{os.environ.get('PATH', '')}"}


async def nbdsh(uri: str, script: str) -> subprocess.CompletedProcess[str]:
    """Runs statements against a connected libnbd handle `h`."""
    return await asyncio.to_thread(
        subprocess.run,
        ["nbdsh", "-u", uri, "-c", script],
        env=system_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


async def slabs_mapped(daemon: Donor) -> int:
    return (await fetch_status(control(daemon), ClientConfig())).pool.slabs_mapped


@pytest.mark.requires_tool("nbdsh")
async def test_pages_go_to_a_leased_slab_and_back(daemon: Donor) -> None:
    async with await session_with(daemon) as session:
        assert session.welcome.data_port == daemon.data
        lease = await session.lease(2)
        slot = await session.map(lease.lease, 0)
        offset = slot.slot * MIB
        script = f"h.pwrite(b'x' * 8192, {offset}); assert h.pread(8192, {offset}) == b'x' * 8192"
        done = await nbdsh(uri(daemon, lease.token), script)
        assert done.returncode == 0, done.stderr
        # The other slot is empty: an error, never somebody's data.
        done = await nbdsh(uri(daemon, lease.token), f"h.pread(4096, {MIB - offset})")
        assert done.returncode != 0
        status = await fetch_status(control(daemon), ClientConfig())
        assert status.leases[0].write_bytes == status.leases[0].read_bytes == 8192


@pytest.mark.requires_tool("nbdsh")
async def test_what_nobody_waits_for_gives_way_to_the_host(daemon: Donor) -> None:
    def nice() -> list[int]:
        tasks = (Path("/proc") / str(daemon.process.pid) / "task").iterdir()
        return sorted(os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks)

    own = os.getpriority(os.PRIO_PROCESS, daemon.process.pid)
    await until(lambda: len(nice()) > 1 and nice()[-1] > own)
    assert nice().count(own) == len(nice()) - 1  # consumers and the host wait for all others


async def test_a_slab_comes_back_zeroed(daemon: Donor) -> None:
    async with await session_with(daemon) as session:
        for _ in range(20):  # more often than there are slabs
            lease = await session.lease(1)
            slot = await session.map(lease.lease, 0)
            script = f"assert not any(h.pread({MIB}, 0)); h.pwrite(b'secret' * 512, 4096)"
            done = await nbdsh(uri(daemon, lease.token), script)
            assert done.returncode == 0, done.stderr
            await session.unmap(lease.lease, slot.slot, slot.generation)
            await session.release(lease.lease)


@pytest.mark.requires_tool("nbdsh")
async def test_a_renewal_fences_the_old_token_and_its_connections(daemon: Donor) -> None:
    first = await session_with(daemon)
    lease = await first.lease(1)
    await first.map(lease.lease, 7)
    # Blocks in the script until the donor cuts the connection, then tries to write all the same.
    held = asyncio.create_task(
        nbdsh(
            uri(daemon, lease.token),
            "h.pwrite(b'a' * 4096, 0)\n"
            "while h.aio_is_ready(): h.poll(100)\n"
            "try:\n h.pwrite(b'late' * 1024, 0)\n"
            "except nbd.Error: print('fenced')\n",
        )
    )
    async with asyncio.timeout(WAIT_S):
        while (await fetch_status(control(daemon), ClientConfig())).leases[0].write_bytes < 4096:
            assert not held.done(), held.result().stderr
            await asyncio.sleep(0.02)
    await first.close()
    async with await session_with(daemon) as second:
        renewed = await second.renew(lease.lease, lease.reclaim, lease.epoch)
        assert renewed.epoch > lease.epoch
        assert [slot.slab for slot in renewed.slots] == [7]
        done = await held
        assert done.stdout.strip() == "fenced", done.stderr
        assert (await nbdsh(uri(daemon, lease.token), "pass")).returncode != 0
        script = "assert h.pread(4096, 0) == b'a' * 4096"
        done = await nbdsh(uri(daemon, renewed.token), script)
        assert done.returncode == 0, done.stderr


@pytest.mark.requires_tool("nbdsh")
async def test_a_data_connection_keeps_a_lease_whose_session_is_gone(daemon: Donor) -> None:
    session = await session_with(daemon)
    lease = await session.lease(1)
    await session.map(lease.lease, 0)
    process = await asyncio.create_subprocess_exec(
        "nbdsh",
        "-u",
        uri(daemon, lease.token),
        "-c",
        "import sys; print('connected', flush=True); sys.stdin.read(); h.pread(4096, 0)",
        env=system_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await process.stdout.readline() == b"connected\n"
        await session.close()
        # Longer than the grace period; a lease that expires wrongly fails the read below.
        await asyncio.sleep(1.5)
        assert await slabs_mapped(daemon) == 1
        await process.communicate(b"")
        assert process.returncode == 0
        while await slabs_mapped(daemon):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_ends_it_cleanly(cluster: Cluster, daemon: Donor, number: int) -> None:
    async with await session_with(daemon) as session:
        lease = await session.lease(1)
        await session.map(lease.lease, 0)
        assert await asyncio.to_thread(daemon.end, number) == 0
        ended = await asyncio.wait_for(session.wait_ended(), WAIT_S)
        assert (ended.reason, ended.by_peer) == (m.GOODBYE_SHUTDOWN, True)
    assert not (cluster.root / "donor0.ready").exists()
    assert daemon.log.rstrip().endswith("stopped")
    with pytest.raises(NoDonorError):
        await session_with(daemon)


async def test_a_killed_daemon_is_noticed_and_its_successor_is_another(
    cluster: Cluster, daemon: Donor
) -> None:
    async with await session_with(daemon) as session:
        before = session.welcome
        await asyncio.to_thread(daemon.end, signal.SIGKILL)
        ended = await asyncio.wait_for(session.wait_ended(), WAIT_S)
        assert ended.reason == LOST
    successor = await asyncio.to_thread(start, cluster, port=daemon.control)
    async with await session_with(successor) as session:
        assert session.welcome.incarnation != before.incarnation


async def test_a_stopped_process_keeps_its_sessions_when_it_goes_on(
    cluster: Cluster,
) -> None:
    cluster.env["INFINISWAP_CLUSTER_HEARTBEATS_MISSED_MAX"] = "100"
    daemon = await asyncio.to_thread(start, cluster)
    async with await session_with(daemon) as session:
        lease = await session.lease(1)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            # Much shorter than the silence that the other end bears, longer than the heartbeat.
            await asyncio.sleep(0.6)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        await session.map(lease.lease, 0)


def test_a_port_in_use_is_one_clear_error(cluster: Cluster, daemon: Donor) -> None:
    done = cluster.cli("daemon", "--listen", daemon.address, "--data-port", "0", "--slab", "1M")
    assert done.returncode == 9
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr
    done = cluster.cli("daemon", "--listen", "127.0.0.1:0", "--data-port", str(daemon.data))
    assert done.returncode == 9
    assert "--data-port" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--listen", "0.0.0.0:0"], 3, "cluster secret"),
        (["--listen", "127.0.0.1:0", "--slab", "2000001"], 3, "multiple"),
        (["--listen", "127.0.0.1:0", "--pool", "lots"], 3, "lots"),
        (["--listen", "127.0.0.1:0", "--pool", "1M", "--slab", "2M"], 3, "smaller than one slab"),
        (["--listen", "127.0.0.1:0", "--pool", "900P"], 3, "more than the"),
        (["--listen", "127.0.0.1:0", "--secret-file", "/no/such/file"], 3, "/no/such/file"),
        (["--listen", "127.0.0.1:0", "--memory-cgroup", "/no/such"], 3, "/no/such"),
        (["--listen", "192.0.2.1:0", "--secret-file", "SECRET"], 10, "192.0.2.1"),
        (["--listen", "127.0.0.1:0", "--ready-file", "/no/such/dir/x"], 10, "/no/such/dir/x"),
        (["--colour", "red"], 2, "--colour"),
    ],
)
def test_bad_arguments_are_one_clear_error(
    cluster: Cluster, args: list[str], code: int, text: str, secret_file: Path
) -> None:
    if "--memory-cgroup" in args and not Path("/sys/fs/cgroup").exists():
        pytest.skip("needs a writable memory cgroup")
    done = cluster.cli("daemon", *[str(secret_file) if arg == "SECRET" else arg for arg in args])
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in done.stderr


def test_a_readable_secret_is_refused(cluster: Cluster, secret_file: Path) -> None:
    secret_file.chmod(0o644)
    done = cluster.cli("daemon", "--listen", "127.0.0.1:0", "--secret-file", str(secret_file))
    assert done.returncode == 3
    assert "0644" in done.stderr


def test_plain_tcp_on_other_addresses_is_warned_about(cluster: Cluster, secret_file: Path) -> None:
    # Loopback addresses get no warning; the last --listen counts.
    args = ["--listen", "0.0.0.0:0", "--secret-file", str(secret_file)]
    running = start(cluster, *args)
    assert "can be read" in running.log
    done = cluster.cli(
        "status", "--donors", f"127.0.0.1:{running.control}", "--secret-file", str(secret_file)
    )
    assert "serving" in done.stdout
    done = cluster.cli("status", "--json", "--donors", f"127.0.0.1:{running.control}")
    row = json.loads(done.stdout)["donors"][0]
    assert not row["reachable"]
    assert "secret" in row["error"]


def test_an_unreachable_donor_is_a_row_of_the_status(cluster: Cluster, daemon: Donor) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{unused.getsockname()[1]}"
        donors = f"{daemon.address},{dead}"
        done = cluster.cli("status", "--json", "--donors", donors)
        assert done.returncode == 0
        alive, other = json.loads(done.stdout)["donors"]
        assert alive["reachable"]
        assert alive["status"]["slab_bytes"] == MIB
        assert not other["reachable"]
        assert "refused" in other["error"]
        done = cluster.cli("status", "--donors", donors)
        assert done.returncode == 0
        assert "unreachable" in done.stdout
        assert "serving" in done.stdout


@pytest.mark.parametrize("port", ["control", "data"])
def test_garbage_on_a_port_does_not_end_it(cluster: Cluster, daemon: Donor, port: str) -> None:
    number = daemon.control if port == "control" else daemon.data
    for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"IHAVEOPT" + b"\xff" * 64):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", number), timeout=WAIT_S) as peer,
        ):
            peer.sendall(garbage)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65_536):
                pass
    done = cluster.cli("status", "--json", "--donors", daemon.address)
    assert json.loads(done.stdout)["donors"][0]["reachable"]


@pytest.mark.requires_memcg
def test_the_pool_stays_within_its_memory_cgroup(cluster: Cluster, memory_cgroup: Path) -> None:
    (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))
    try:
        args = ("--memory-cgroup", str(memory_cgroup), "--pool", "auto", "--headroom", "64M")
        running = start(cluster, *args)
    finally:
        (memory_cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
    done = cluster.cli("status", "--json", "--donors", f"127.0.0.1:{running.control}")
    status = json.loads(done.stdout)["donors"][0]["status"]
    assert status["memory"]["source"].endswith(memory_cgroup.name)
    assert status["memory"]["total_bytes"] == 256 * MIB
    assert status["pool"]["limit_bytes"] == 192 * MIB
    # What the daemon itself takes is not lent.
    assert 0 < status["pool"]["can_map"] < 192
    assert running.end() == 0


@pytest.fixture
def memory_cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A memory cgroup of 256 MiB."""
    from infiniswap.errors import InfiniswapError
    from infiniswap.system.memory import memory_hierarchy

    try:
        hierarchy = memory_hierarchy()
    except InfiniswapError as error:
        pytest.skip(f"needs a writable memory cgroup ({error.what})")
    path = hierarchy.own / f"infiniswap-test-{os.getpid()}"
    path.mkdir()
    name = "memory.max" if hierarchy.version == 2 else "memory.limit_in_bytes"
    try:
        (path / name).write_text(str(256 * MIB))
        yield path
    finally:
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                path.rmdir()
                break
            except OSError:
                assert time.monotonic() < end_s
                time.sleep(0.05)
