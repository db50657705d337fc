# SPDX-License-Identifier: Apache-2.0
"""`infiniswap daemon` and `infiniswap status` as real processes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support.devices.cluster import WAIT_S, Cluster, Donor, until
from support.donors.donor_world import KEYS, world

from infiniswap.control import messages as m
from infiniswap.control.channel import LOST
from infiniswap.control.client import (
    ClientConfig,
    Identity,
    QuietHandler,
    Session,
    connect,
)
from infiniswap.control.local import LocalPort, fetch_local_status, local_path
from infiniswap.errors import NoDonorError, WrongSecretError
from infiniswap.keys import Keys, parse
from infiniswap.secret import host_keys, write_secret
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


def daemon_keys(daemon: Donor) -> Keys:
    """Of the secret that it has made for its host."""
    found = host_keys(daemon.state_dir)
    assert found is not None
    return found


async def session_with(daemon: Donor) -> Session:
    config = ClientConfig(daemon_keys(daemon), connect_s=WAIT_S, request_s=WAIT_S)
    return await connect(control(daemon), IDENTITY, config, QuietHandler(), slab_bytes=MIB)


def test_what_nobody_waits_for_gives_way_to_the_host(daemon: Donor) -> None:
    def nice() -> list[int]:
        tasks = (Path("/proc") / str(daemon.process.pid) / "task").iterdir()
        return sorted(os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks)

    own = os.getpriority(os.PRIO_PROCESS, daemon.process.pid)
    until(lambda: len(nice()) > 1 and nice()[-1] > own, "a thread that gives way")
    assert nice().count(own) == len(nice()) - 1  # consumers and the host wait for all others


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_ends_it_cleanly(
    cluster: Cluster, daemon: Donor, number: signal.Signals
) -> None:
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
        (["--listen", "127.0.0.1:0", "--pool", "1M", "--slab", "2M"], 3, "smaller than one slab"),
        (["--listen", "127.0.0.1:0", "--pool", "900P"], 3, "more than the"),
        (["--listen", "127.0.0.1:0", "--secret-file", "/no/such/file"], 3, "/no/such/file"),
        (["--listen", "127.0.0.1:0", "--memory-cgroup", "/no/such"], 3, "/no/such"),
        (["--listen", "127.0.0.1:0", "--secret-file", "READABLE"], 3, "0644"),
        (["--listen", "192.0.2.1:0", "--secret-file", "SECRET"], 10, "192.0.2.1"),
        (["--listen", "127.0.0.1:0", "--ready-file", "/no/such/dir/x"], 10, "/no/such/dir/x"),
    ],
)
def test_bad_arguments_are_one_clear_error(
    cluster: Cluster, args: list[str], code: int, text: str, secret_file: Path
) -> None:
    if "--memory-cgroup" in args and not Path("/sys/fs/cgroup").exists():
        pytest.skip("needs a writable memory cgroup")
    if "READABLE" in args:
        secret_file.chmod(0o644)
    secret = str(secret_file)
    done = cluster.cli(
        "daemon", *[secret if arg in ("SECRET", "READABLE") else arg for arg in args]
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in done.stderr


def test_plain_tcp_on_other_addresses_is_warned_about(cluster: Cluster, secret_file: Path) -> None:
    # Loopback addresses get no warning; the last --listen counts.
    secret = ("--secret-file", str(secret_file))
    running = start(cluster, "--listen", "0.0.0.0:0", *secret)
    assert "can read them" in running.log
    assert "serving" in cluster.ok("status", "--donors", running.address, *secret)
    row = cluster.donor_row(running)
    assert not row["reachable"]
    assert "secret" in row["error"]


@pytest.mark.requires_memcg
def test_the_pool_stays_within_its_memory_cgroup(cluster: Cluster, memory_cgroup: Path) -> None:
    (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))
    try:
        args = ("--memory-cgroup", str(memory_cgroup), "--pool", "auto", "--headroom", "64M")
        running = start(cluster, *args)
    finally:
        (memory_cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
    status = cluster.donor_row(running)["status"]
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

    def removed() -> bool:
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    path.mkdir()
    name = "memory.max" if hierarchy.version == 2 else "memory.limit_in_bytes"
    try:
        (path / name).write_text(str(256 * MIB))
        yield path
    finally:
        until(removed, "its processes to end")


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
async def test_other_users_of_its_host_read_its_status_and_do_nothing_else(
    cluster: Cluster,
) -> None:
    """Where no secret is configured. Whatever they say over loopback needs a proof."""
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(cluster.root / "donors")
    # As the unit starts it.
    umask = ("sh", "-c", 'umask 077; exec "$@"', "sh")
    daemon = await asyncio.to_thread(cluster.donor, "--slab", "1M", pool="16M", prefix=umask)
    cluster.root.chmod(0o711)
    cluster.env["INFINISWAP_DAEMON_LISTEN"] = daemon.address
    own = cluster.program

    def told(*args: str, by: tuple[str, ...] = NOBODY) -> subprocess.CompletedProcess[str]:
        cluster.program = (*by, *own)
        try:
            return cluster.cli(*args)
        finally:
            cluster.program = own

    for by in (NOBODY, ()):
        done = await asyncio.to_thread(told, "status", "--json", by=by)
        (row,) = json.loads(done.stdout)["donors"]
        assert (row["address"], row["state"]) == (daemon.address, "serving"), done.stdout
    done = await asyncio.to_thread(told, "doctor", "--json", "--donors", daemon.address)
    assert [each["what"] for each in json.loads(done.stdout) if "can lend" in each["what"]]
    assert "secret" not in "".join(
        each["what"] for each in json.loads(done.stdout) if each["name"] == "donors"
    )
    done = await asyncio.to_thread(told, "donor", "drain", daemon.address)
    assert (done.returncode, "none is configured here" in done.stderr) == (7, True), done.stderr
    with pytest.raises(WrongSecretError):
        await connect(control(daemon), IDENTITY, ClientConfig(), QuietHandler())
    path = cluster.root / "donors/local" / f"{daemon.address}.sock"
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector) as http:
        for method, route, code in (
            ("GET", m.STATUS_PATH, 200),
            ("GET", "/metrics", 200),
            ("POST", m.DRAIN_PATH, 404),
            ("POST", m.STATUS_PATH, 405),
            ("GET", m.SESSION_PATH, 404),
            ("GET", m.NONCE_PATH, 404),
        ):
            async with http.request(method, f"http://donor{route}") as answer:
                assert answer.status == code, route
    await asyncio.to_thread(daemon.end)
    assert not path.exists()


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
async def test_an_ordinary_user_lends_and_borrows_without_a_secret(
    cluster: Cluster,
) -> None:
    """On loopback; what a daemon of root keeps below /var/lib it keeps below its user's home."""
    cluster.root.chmod(0o777)
    home = cluster.root / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    del cluster.env["INFINISWAP_DAEMON_STATE_DIR"]
    cluster.env |= {"HOME": str(home), "XDG_STATE_HOME": ""}
    daemon = await asyncio.to_thread(cluster.donor, "--slab", "1M", pool="16M", prefix=NOBODY)
    state = home / ".local/state/infiniswap"
    keys = parse((state / "host-secret").read_bytes().strip())
    config = ClientConfig(keys, connect_s=WAIT_S, request_s=WAIT_S)
    async with await connect(control(daemon), IDENTITY, config, QuietHandler()) as session:
        await session.lease(1)
    own = cluster.program
    cluster.program = (*NOBODY, *own)
    done = await asyncio.to_thread(cluster.cli, "donor", "drain", daemon.address)
    cluster.program = own
    assert done.returncode == 0, done.stderr


@pytest.mark.requires_root
async def test_a_directory_that_others_may_write_to_gets_no_socket(cluster: Cluster) -> None:
    """They could put a link in the socket's place, to a file that the daemon then opens to all."""
    run_dir = cluster.root / "donors"
    run_dir.mkdir()
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(run_dir)
    for owner, mode in ((65534, 0o755), (0, 0o775), (0, 0o757)):
        os.chown(run_dir, owner, 0)
        run_dir.chmod(mode)
        daemon = await asyncio.to_thread(start, cluster)
        assert "other users of this host cannot read the status" in daemon.log
        why = "can be changed by other users" if owner == 0 else "belongs to another user"
        assert f"{run_dir}: the directory {why}" in daemon.log
        assert not list(run_dir.iterdir())
        await asyncio.to_thread(daemon.end)
    # As a release before this one has made it.
    os.chown(run_dir, 0, 0)
    run_dir.chmod(0o700)
    daemon = await asyncio.to_thread(start, cluster)
    assert run_dir.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (run_dir / "local").iterdir() if path.is_socket()]


@pytest.mark.requires_root
async def test_a_killed_daemons_socket_is_replaced_and_given_back(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(cluster.root / "donors")
    daemon = await asyncio.to_thread(start, cluster)
    path = cluster.root / "donors/local" / f"{daemon.address}.sock"
    await asyncio.to_thread(daemon.end, signal.SIGKILL)
    assert path.is_socket()
    successor = await asyncio.to_thread(cluster.successor, daemon)
    assert (await fetch_local_status(path, WAIT_S)).control_port == successor.control
    await asyncio.to_thread(successor.end, signal.SIGKILL)
    await asyncio.to_thread(cluster.ok, "daemon", "--release")
    assert not path.exists()


@pytest.mark.parametrize("is_there", [True, False])
async def test_the_directory_goes_with_the_last_socket(tmp_path: Path, is_there: bool) -> None:
    """Python 3.13 and later remove the socket themselves when its server is closed."""
    async with world() as w:
        local = LocalPort(w.donor.service, Counter())
        path = local_path(tmp_path / "donors", HostPort("127.0.0.1", 9400))
        path.parent.mkdir(parents=True)
        await local.start(path)
        if not is_there:
            path.unlink()
        await local.stop()
        assert not path.parent.parent.exists()


@pytest.mark.requires_root
async def test_two_daemons_with_one_port_on_two_addresses_have_a_socket_each(
    cluster: Cluster,
) -> None:
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(cluster.root / "donors")
    first = await asyncio.to_thread(cluster.donor, "--name", "first")
    second = await asyncio.to_thread(
        cluster.donor, "--name", "second", host="127.0.0.2", port=first.control
    )
    for daemon, name in ((first, "first"), (second, "second")):
        path = cluster.root / "donors/local" / f"{daemon.address}.sock"
        assert (await fetch_local_status(path, WAIT_S)).donor_name == name


async def test_with_a_cluster_secret_there_is_no_such_socket(
    cluster: Cluster, secret_file: Path
) -> None:
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(cluster.root / "donors")
    daemon = await asyncio.to_thread(start, cluster, "--secret-file", str(secret_file))
    assert not (cluster.root / "donors/local" / f"{daemon.address}.sock").exists()
    assert not (cluster.root / "state" / "host-secret").exists()


def test_a_session_key_is_not_enough_to_lend(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "session-key"
    write_secret(key, KEYS.session_key_text())
    done = cluster.cli("daemon", "--listen", "127.0.0.1:0", "--secret-file", str(key))
    assert (done.returncode, "needs the cluster secret itself" in done.stderr) == (3, True)
