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
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
from infiniswap.errors import NoDonorError, RequestRefusedError
from infiniswap.units import MIB, HostPort

pytestmark = pytest.mark.requires_native

WAIT_S = 60.0
IDENTITY = Identity("00000000-0000-0000-0000-00000000000b", "swap0", "consumer")


class Daemon:
    """A running daemon process."""

    def __init__(self, process: subprocess.Popen[str], ready: Path, log: Path) -> None:
        self.process = process
        self.ready = ready
        self._log = log
        ports = json.loads(ready.read_text())
        assert ports["pid"] == process.pid
        self.control = HostPort("127.0.0.1", ports["control_port"])
        self.data_port: int = ports["data_port"]

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def session(self, **changes: Any) -> Session:
        config = ClientConfig(**{"connect_s": WAIT_S, "request_s": WAIT_S, **changes})
        return await connect(self.control, IDENTITY, config, QuietHandler(), slab_bytes=MIB)

    def uri(self, token: str) -> str:
        return f"nbd://127.0.0.1:{self.data_port}/{token}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "INFINISWAP" not in name}


def infiniswap(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infiniswap", *args]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.fixture
def configuration_file(tmp_path: Path) -> Path:
    path = tmp_path / "infiniswap.toml"
    path.write_text(
        '[daemon]\nslab = "1M"\npool = "16M"\nheadroom = "16M"\nlease_grace_s = 0.5\n'
        'run_dir = ""\n'
        "[policy]\nperiod_s = 0.1\n[cluster]\nheartbeat_s = 0.2\n"
    )
    return path


@pytest.fixture
def start(tmp_path: Path, configuration_file: Path) -> Iterator[Callable[..., Daemon]]:
    processes: list[subprocess.Popen[str]] = []

    def run(*args: str) -> Daemon:
        number = len(processes)
        ready, log = tmp_path / f"ready{number}", tmp_path / f"log{number}"
        command = [sys.executable, "-m", "infiniswap", "daemon", "--listen", "127.0.0.1:0"]
        command += ["--config", str(configuration_file), "--ready-file", str(ready), *args]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment(), text=True, stdout=output, stderr=output
            )
        processes.append(process)
        end_s = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.02)
        return Daemon(process, ready, log)

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_S)


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    return start()


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


async def slabs_mapped(daemon: Daemon) -> int:
    return (await fetch_status(daemon.control, ClientConfig())).pool.slabs_mapped


@pytest.mark.requires_tool("nbdsh")
async def test_pages_go_to_a_leased_slab_and_back(daemon: Daemon) -> None:
    async with await daemon.session() as session:
        assert session.welcome.data_port == daemon.data_port
        lease = await session.lease(2)
        slot = await session.map(lease.lease, 0)
        offset = slot.slot * MIB
        script = f"h.pwrite(b'x' * 8192, {offset}); assert h.pread(8192, {offset}) == b'x' * 8192"
        done = await nbdsh(daemon.uri(lease.token), script)
        assert done.returncode == 0, done.stderr
        # The other slot is empty: an error, never somebody's data.
        done = await nbdsh(daemon.uri(lease.token), f"h.pread(4096, {MIB - offset})")
        assert done.returncode != 0
        status = await fetch_status(daemon.control, ClientConfig())
        assert status.leases[0].write_bytes == status.leases[0].read_bytes == 8192


@pytest.mark.requires_tool("nbdsh")
async def test_what_nobody_waits_for_gives_way_to_the_host(daemon: Daemon) -> None:
    def nice() -> list[int]:
        tasks = (Path("/proc") / str(daemon.process.pid) / "task").iterdir()
        return sorted(os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks)

    own = os.getpriority(os.PRIO_PROCESS, daemon.process.pid)
    await until(lambda: len(nice()) > 1 and nice()[-1] > own)
    assert nice().count(own) == len(nice()) - 1  # consumers and the host wait for all others


async def test_a_slab_comes_back_zeroed(daemon: Daemon) -> None:
    async with await daemon.session() as session:
        for _ in range(20):  # more often than there are slabs
            lease = await session.lease(1)
            slot = await session.map(lease.lease, 0)
            script = f"assert not any(h.pread({MIB}, 0)); h.pwrite(b'secret' * 512, 4096)"
            done = await nbdsh(daemon.uri(lease.token), script)
            assert done.returncode == 0, done.stderr
            await session.unmap(lease.lease, slot.slot, slot.generation)
            await session.release(lease.lease)


@pytest.mark.requires_tool("nbdsh")
async def test_a_renewal_fences_the_old_token_and_its_connections(daemon: Daemon) -> None:
    first = await daemon.session()
    lease = await first.lease(1)
    await first.map(lease.lease, 7)
    # Blocks in the script until the donor cuts the connection, then tries to write all the same.
    held = asyncio.create_task(
        nbdsh(
            daemon.uri(lease.token),
            "h.pwrite(b'a' * 4096, 0)\n"
            "while h.aio_is_ready(): h.poll(100)\n"
            "try:\n h.pwrite(b'late' * 1024, 0)\n"
            "except nbd.Error: print('fenced')\n",
        )
    )
    async with asyncio.timeout(WAIT_S):
        while (await fetch_status(daemon.control, ClientConfig())).leases[0].write_bytes < 4096:
            assert not held.done(), held.result().stderr
            await asyncio.sleep(0.02)
    await first.close()
    async with await daemon.session() as second:
        renewed = await second.renew(lease.lease, lease.reclaim, lease.epoch)
        assert renewed.epoch > lease.epoch
        assert [slot.slab for slot in renewed.slots] == [7]
        done = await held
        assert done.stdout.strip() == "fenced", done.stderr
        assert (await nbdsh(daemon.uri(lease.token), "pass")).returncode != 0
        script = "assert h.pread(4096, 0) == b'a' * 4096"
        done = await nbdsh(daemon.uri(renewed.token), script)
        assert done.returncode == 0, done.stderr


@pytest.mark.requires_tool("nbdsh")
async def test_a_data_connection_keeps_a_lease_whose_session_is_gone(daemon: Daemon) -> None:
    session = await daemon.session()
    lease = await session.lease(1)
    await session.map(lease.lease, 0)
    process = await asyncio.create_subprocess_exec(
        "nbdsh",
        "-u",
        daemon.uri(lease.token),
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


async def test_the_end_of_the_grace_period_frees_the_slabs(daemon: Daemon) -> None:
    session = await daemon.session()
    lease = await session.lease(4)
    for slab in range(4):
        await session.map(lease.lease, slab)
    await session.close()
    async with asyncio.timeout(WAIT_S):
        while await slabs_mapped(daemon):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)
    assert "did not come back" in daemon.log
    async with await daemon.session() as late:
        with pytest.raises(RequestRefusedError) as caught:
            await late.renew(lease.lease, lease.reclaim, lease.epoch)
        assert caught.value.reason == m.REFUSED_UNKNOWN_LEASE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_ends_it_cleanly(daemon: Daemon, number: int) -> None:
    async with await daemon.session() as session:
        lease = await session.lease(1)
        await session.map(lease.lease, 0)
        assert await asyncio.to_thread(daemon.stop, number) == 0
        ended = await asyncio.wait_for(session.wait_ended(), WAIT_S)
        assert (ended.reason, ended.by_peer) == (m.GOODBYE_SHUTDOWN, True)
    assert not daemon.ready.exists()
    assert daemon.log.rstrip().endswith("stopped")
    assert "Traceback" not in daemon.log
    with pytest.raises(NoDonorError):
        await daemon.session()


async def test_a_killed_daemon_is_noticed_and_its_successor_is_another(
    daemon: Daemon, start: Callable[..., Daemon]
) -> None:
    async with await daemon.session() as session:
        before = session.welcome
        await asyncio.to_thread(daemon.stop, signal.SIGKILL)
        ended = await asyncio.wait_for(session.wait_ended(), WAIT_S)
        assert ended.reason == LOST
    # The next port may be anybody's.
    args = ("--listen", str(daemon.control), "--data-port", "0")
    successor = await asyncio.to_thread(start, *args)
    assert successor.control == daemon.control
    async with await successor.session() as session:
        assert session.welcome.incarnation != before.incarnation


async def test_a_stopped_process_keeps_its_sessions_when_it_goes_on(
    start: Callable[..., Daemon], configuration_file: Path
) -> None:
    with configuration_file.open("a") as file:  # its last section is that of the cluster
        file.write("heartbeats_missed_max = 100\n")
    daemon = await asyncio.to_thread(start)
    async with await daemon.session() as session:
        lease = await session.lease(1)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            # Much shorter than the silence that the other end bears, longer than the heartbeat.
            await asyncio.sleep(0.6)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        await session.map(lease.lease, 0)


def test_a_port_in_use_is_one_clear_error(daemon: Daemon) -> None:
    done = infiniswap("daemon", "--listen", str(daemon.control), "--data-port", "0", "--slab", "1M")
    assert done.returncode == 9
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr
    done = infiniswap("daemon", "--listen", "127.0.0.1:0", "--data-port", str(daemon.data_port))
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
    args: list[str], code: int, text: str, tmp_path: Path
) -> None:
    if "--memory-cgroup" in args and not Path("/sys/fs/cgroup").exists():
        pytest.skip("needs a writable memory cgroup")
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the test cluster")
    done = infiniswap("daemon", *[str(secret) if arg == "SECRET" else arg for arg in args])
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in done.stderr


def test_a_readable_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the test cluster")
    secret.chmod(0o644)
    done = infiniswap("daemon", "--listen", "127.0.0.1:0", "--secret-file", str(secret))
    assert done.returncode == 3
    assert "0644" in done.stderr


def test_plain_tcp_on_other_addresses_is_warned_about(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the test cluster")
    # Loopback addresses get no warning; the last --listen counts.
    args = ["--listen", "0.0.0.0:0", "--secret-file", str(secret)]
    running = start(*args)
    assert "can be read" in running.log
    done = infiniswap("status", "--donors", str(running.control), "--secret-file", str(secret))
    assert "serving" in done.stdout
    done = infiniswap("status", "--json", "--donors", str(running.control))
    row = json.loads(done.stdout)["donors"][0]
    assert not row["reachable"]
    assert "secret" in row["error"]


def test_an_unreachable_donor_is_a_row_of_the_status(daemon: Daemon) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{unused.getsockname()[1]}"
        donors = f"{daemon.control},{dead}"
        done = infiniswap("status", "--json", "--donors", donors)
        assert done.returncode == 0
        alive, other = json.loads(done.stdout)["donors"]
        assert alive["reachable"]
        assert alive["status"]["slab_bytes"] == MIB
        assert not other["reachable"]
        assert "refused" in other["error"]
        done = infiniswap("status", "--donors", donors)
        assert done.returncode == 0
        assert "unreachable" in done.stdout
        assert "serving" in done.stdout


@pytest.mark.parametrize("port", ["control", "data"])
def test_garbage_on_a_port_does_not_end_it(daemon: Daemon, port: str) -> None:
    number = daemon.control.port if port == "control" else daemon.data_port
    for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"IHAVEOPT" + b"\xff" * 64):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", number), timeout=WAIT_S) as peer,
        ):
            peer.sendall(garbage)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65_536):
                pass
    done = infiniswap("status", "--json", "--donors", str(daemon.control))
    assert json.loads(done.stdout)["donors"][0]["reachable"]
    assert "Traceback" not in daemon.log


@pytest.mark.requires_memcg
def test_the_pool_stays_within_its_memory_cgroup(
    start: Callable[..., Daemon], memory_cgroup: Path
) -> None:
    (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))
    try:
        running = start(
            "--memory-cgroup", str(memory_cgroup), "--pool", "auto", "--headroom", "64M"
        )
    finally:
        (memory_cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
    done = infiniswap("status", "--json", "--donors", str(running.control))
    status = json.loads(done.stdout)["donors"][0]["status"]
    assert status["memory"]["source"].endswith(memory_cgroup.name)
    assert status["memory"]["total_bytes"] == 256 * MIB
    assert status["pool"]["limit_bytes"] == 192 * MIB
    # What the daemon itself takes is not lent.
    assert 0 < status["pool"]["can_map"] < 192
    assert running.stop() == 0


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
