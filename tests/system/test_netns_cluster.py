# SPDX-License-Identifier: Apache-2.0
"""tools/netns-cluster: a cluster on one machine, what can be done to it, and that nothing stays."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netns_cluster import leftovers, memory, network, record
from netns_cluster.cluster import Cluster
from support.devices.cluster import SLAB, WAIT_S, run, until
from support.donors.broker import Broker
from support.jobs.runs import touch
from support.machine.netns_hosts import (
    HostedDevice,
    cluster_of,
    left_of,
    links,
    on_host,
    unused_name,
)

from infiniswap.control.tls import client_context
from infiniswap.errors import ConflictError, MemoryLimitError, NotFoundError, UsageError
from infiniswap.units import CONTROL_PORT, MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_memcg,
    pytest.mark.requires_netns,
    pytest.mark.requires_tool("ip", "tc", "nsenter", "setsid", "nbdcopy"),
]

ROOT = Path(__file__).resolve().parents[2]
TOOL = str(ROOT / "tools" / "netns-cluster")
HOST_MEMORY = 256 * MIB
HEADROOM = 48 * MIB
DEVICE_MIB = 48
SLABS = DEVICE_MIB * MIB // SLAB
PAGES = DEVICE_MIB * 256
SETTINGS = {
    "policy.period_s": "0.2",
    "policy.hot_pages_per_s": "1.0",
    "daemon.lease_grace_s": "2.0",
}


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three hosts; a test leaves them as it found them."""
    with cluster_of([HOST_MEMORY] * 3, HEADROOM, SETTINGS) as made:
        yield made


class Device(HostedDevice):
    """A device of h1's that programs reach by a socket."""

    def __init__(self, cluster: Cluster, *args: str) -> None:
        size = ("--size", f"{DEVICE_MIB}M", "--frontend", "nbd-socket")
        super().__init__(cluster, "h1", f"d{secrets.token_hex(3)}", *size, *args)
        self.uri = f"nbd+unix:///?socket={self.run / 'nbd.sock'}"
        self.data = secrets.token_bytes(DEVICE_MIB * MIB)

    def fill(self, file: Path) -> None:
        """Writes all of it."""
        file.write_bytes(self.data)
        run("nbdcopy", file, self.uri)

    def until_mapped(self, file: Path, only: str = "") -> None:
        """Until every slab and every page is on a donor, or on this one; those that are not yet
        are kept busy. That a host was cut off may still have to be noticed."""

        def all_there() -> bool:
            self.verify(file)
            status = self.status
            if only and self.slabs()[only] < SLABS:
                return False
            return (status["slabs"]["mapped"], status["pages_on_donors"]) == (SLABS, PAGES)

        until(all_there, f"every slab on {only or 'donors'}")

    def verify(self, file: Path) -> None:
        """All of it is still there."""
        run("nbdcopy", self.uri, file)
        assert file.read_bytes() == self.data

    def slabs(self) -> dict[str, int]:
        """How many each donor has, by its name."""
        return {donor["name"]: donor["slabs"] for donor in self.status["donors"]}


@contextlib.contextmanager
def device(cluster: Cluster, *args: str) -> Iterator[Device]:
    """A device for a while."""
    made = Device(cluster, *args)
    try:
        yield made
    finally:
        made.command("remove")


def slabs_mapped(cluster: Cluster, host: str) -> int:
    """What the daemon itself says; -1 while it says nothing."""
    status = cluster.state(host).status
    return status.pool.slabs_mapped if status is not None else -1


def connect_s(cluster: Cluster, source: str, target: str, timeout_s: float = 5.0) -> float:
    """How long a connection from host to host takes."""
    address = (cluster.record.host(target).address, CONTROL_PORT)

    def connect() -> float:
        start_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            socket.create_connection(address, timeout_s).close()
        return time.monotonic() - start_s

    return network.call_inside(cluster.name, source, connect)


def test_hosts_are_apart_and_see_their_own_memory(three: Cluster) -> None:
    states = three.states()
    assert [one.host.name for one in states] == ["h1", "h2", "h3"]
    for one in states:
        assert one.daemon == "serving"
        assert one.status is not None
        assert one.status.memory.total_bytes == HOST_MEMORY
    # The machine that they are on does not even have a way there.
    assert states[0].host.address.rpartition(".")[0] not in run(
        "ip", "route", "show", "table", "all"
    )
    command = three.command("h2", ["cat", "/proc/self/cgroup"])
    assert f"/{record.PREFIX}{three.name}/h2/jobs" in run(*command)
    command = three.command("h2", ["cat", "/proc/self/cgroup"], cgroup=False)
    assert f"{record.PREFIX}{three.name}" not in run(*command)


def test_a_cut_host_loses_its_slabs_to_another_and_no_page(three: Cluster, tmp_path: Path) -> None:
    with device(three) as one:
        one.fill(tmp_path / "data")
        one.until_mapped(tmp_path / "back")
        assert min(one.slabs()["h2"], one.slabs()["h3"]) > 0
        until(lambda: slabs_mapped(three, "h2") == one.slabs()["h2"], "h2 to say the same")
        before = one.status["stats"]["pages_in_remote"]

        def came_from_donors() -> bool:
            one.verify(tmp_path / "back")
            return bool(one.status["stats"]["pages_in_remote"] > before)

        until(came_from_donors, "pages from donors, be they only to measure them")
        three.cut("h2")
        three.cut("h2")
        try:
            # Swallowed, not refused; and h2's own people still reach their daemon.
            assert connect_s(three, "h1", "h2", 0.5) >= 0.5
            assert three.state("h2").daemon == "serving"
            one.verify(tmp_path / "back")
            one.until_mapped(tmp_path / "back", "h3")
            one.verify(tmp_path / "back")
        finally:
            three.heal("h2")
        three.heal("h2")
        until(lambda: connect_s(three, "h1", "h2") < 4.0, "h2 to be reached again")
        until(lambda: slabs_mapped(three, "h2") == 0, "h2 to hear that its slabs are not wanted")
        one.verify(tmp_path / "back")
        assert one.status["stats"]["requests_failed"] == 0


def test_a_frozen_and_a_killed_daemon_lose_no_page(three: Cluster, tmp_path: Path) -> None:
    with device(three) as one:
        one.fill(tmp_path / "data")
        one.until_mapped(tmp_path / "back")
        three.freeze("h2")
        three.freeze("h2")
        try:
            assert three.state("h2").daemon == "frozen"
            one.verify(tmp_path / "back")
        finally:
            three.thaw("h2")
        until(lambda: three.state("h2").daemon == "serving", "h2 to go on")

        three.kill("h3")
        three.kill("h3")
        assert three.state("h3").daemon == "dead"
        with pytest.raises(ConflictError, match="is dead"):
            three.freeze("h3")
        one.verify(tmp_path / "back")
        before = three.record.host("h3").daemon
        three.restart("h3")
        assert three.state("h3").daemon == "serving"
        assert three.record.host("h3").daemon != before
        one.until_mapped(tmp_path / "back")
        assert one.status["stats"]["requests_failed"] == 0


def test_a_squeezed_host_gets_its_memory_back(three: Cluster, tmp_path: Path) -> None:
    with device(three, "--donors", three.record.host("h3").address) as one:
        one.fill(tmp_path / "data")
        one.until_mapped(tmp_path / "back", "h3")
        lent = SLABS
        until(lambda: slabs_mapped(three, "h3") == lent, "h3 to say the same")
        state = three.state("h3")
        assert state.status is not None
        assert state.memory.available_bytes is not None
        free_bytes = state.status.pool.slabs_free * SLAB
        # What is left, the free slabs, and half of those that are lent: short by the latter.
        take = state.memory.available_bytes - HEADROOM + free_bytes + lent // 2 * SLAB
        three.squeeze("h3", take)
        three.squeeze("h3", take)
        until(lambda: 0 <= slabs_mapped(three, "h3") < lent, "slabs that come back")
        assert one.status["evictions"] > 0

        def has_headroom() -> bool:
            available = three.state("h3").memory.available_bytes
            return available is not None and available >= HEADROOM - SLAB

        until(has_headroom, "the host's headroom")
        assert three.state("h3").memory.oom_kills == 0
        one.verify(tmp_path / "back")
        three.release("h3")
        three.release("h3")
        one.until_mapped(tmp_path / "back", "h3")  # again
    assert three.state("h3").daemon == "serving"
    with pytest.raises(MemoryLimitError, match="ran out"):
        three.squeeze("h3", HOST_MEMORY - 4 * MIB)
    assert three.state("h3").host.squeezer is None
    three.restart("h3")  # should the kernel have chosen it after all


def test_a_delay_goes_either_way_and_off_again(three: Cluster, tmp_path: Path) -> None:
    three.delay("h2", 150.0)
    try:
        # One round trip at least; more when the address has to be asked for, or when this process
        # waits for its turn, so that only the best of several says anything about the other ways.
        assert connect_s(three, "h1", "h2") >= 0.3
        until(lambda: connect_s(three, "h1", "h3") < 0.3, "a connection without a delay")
        three.delay("h2", 1.0)
        donor = ("--donors", three.record.host("h2").address)
        with device(three, *donor) as one:
            one.fill(tmp_path / "data")
            one.until_mapped(tmp_path / "back", "h2")
            one.verify(tmp_path / "back")
            stats = one.status["stats"]
            assert stats["pages_in_remote"] > 0
            assert stats["crc_errors_remote"] == stats["requests_failed"] == 0
            three.cut("h2")  # a relay lives through that
            three.heal("h2")
            one.verify(tmp_path / "back")
    finally:
        three.heal("h2")
    assert three.state("h2").host.relay is None
    until(lambda: connect_s(three, "h1", "h2") < 0.3, "a connection without a delay")


@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_swap
def test_a_job_on_a_host_swaps_to_the_others(three: Cluster) -> None:
    argv = ["infiniswap", "run", "--local", "32M", "--size", "128M", "--", *touch(64)]
    done = on_host(three, "h1", *argv)
    assert "round 0" in done.stdout
    assert "paged out" in done.stderr


# ------------------------------------------------------------------------- the command


def tool(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    return subprocess.run(
        [sys.executable, TOOL, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )


@contextlib.contextmanager
def foreground(name: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`up` with two hosts, as in a terminal."""
    argv = [sys.executable, TOOL, "up", "--name", name, "--hosts", "2", "--memory", "128M"]
    argv += ["--slab", "8M", "--link", "h2=100mbit"]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
    try:

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            return "To go on" in log.read_text()

        until(is_up, "the cluster to be up")
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


def test_nothing_stays_however_it_ends(tmp_path: Path) -> None:
    name, log, before = unused_name(), tmp_path / "log", links()
    option = ("--name", name)
    try:
        with foreground(name, log) as process:
            text = log.read_text()
            assert "h2" in text
            assert "100mbit" in text
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
        assert left_of(name), "a killed command leaves things behind, else this tests nothing"

        with foreground(name, log) as process:  # takes that away first
            exec_h1 = ("exec", *option, "h1", "--")
            done = tool(*exec_h1, "sh", "-c", "exit 7")
            assert done.returncode == 7
            start = ("infiniswap", "device", "start", "left", "--size", "16M")
            done = tool(*exec_h1, *start, "--frontend", "nbd-socket")
            assert done.returncode == 0, done.stderr
            assert tool("delay", *option, "h1", "5ms").returncode == 0
            assert tool("freeze", *option, "h2").returncode == 0
            assert tool("cut", *option, "h2").returncode == 0
            sleeper = subprocess.Popen([sys.executable, TOOL, *exec_h1, "sleep", "600"])
            jobs = memory.host_cgroup(name, "h1").path / memory.JOBS / "cgroup.procs"
            until(lambda: str(sleeper.pid) in jobs.read_text().split(), "the job on h1")
            status = {
                one["name"]: one for one in json.loads(tool("status", *option, "--json").stdout)
            }
            assert status["h1"]["delay_ms"] == 5.0
            assert status["h2"]["daemon"] == "frozen"
            assert status["h2"]["cut"]
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
        done = tool("down", *option)
        assert done.returncode == 0, done.stderr
        sleeper.wait(WAIT_S)
        assert not left_of(name)

        with foreground(name, log) as process:
            done = tool("up", *option)
            assert done.returncode == ConflictError.exit_code
            assert "down --name" in done.stderr
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0, log.read_text()
        assert not left_of(name)
        done = tool("status", *option)
        assert done.returncode == NotFoundError.exit_code
        assert tool("down", *option).returncode == 0
    finally:
        leftovers.sweep(name)
    assert links() == before


def test_mistakes_are_told_and_make_nothing() -> None:
    name = unused_name()
    for args, code, text in (
        (("up", "--name", "Large"), UsageError.exit_code, "cannot name a cluster"),
        (("up", "--memory", "9T"), MemoryLimitError.exit_code, "more than this machine has"),
        (("up", "--memory", "8M"), UsageError.exit_code, "at least 96M"),
        (("up", "--link", "fast"), UsageError.exit_code, "is no speed of a link"),
        (("up", "--memory", "h7=1G"), UsageError.exit_code, "the hosts are h1 to h3"),
        (("up", "--set", "policy.nope=1"), 3, "unknown key policy.nope"),
        (("cut", "h1"), NotFoundError.exit_code, "there is no cluster"),
        (("delay", "h1", "soon"), UsageError.exit_code, "is no delay"),
        (("exec", "h1"), UsageError.exit_code, "no command"),
        (("mend", "h1"), UsageError.exit_code, "invalid choice"),
    ):
        named = args if "--name" in args else (args[0], "--name", name, *args[1:])
        done = tool(*named)
        assert done.returncode == code, (args, done.stderr)
        assert text in done.stderr, (args, done.stderr)
        assert "Traceback" not in done.stderr
    assert not left_of(name)


# ------------------------------------------------------------------------ with a broker


TOKEN = "a-token-of-thirty-two-characters"


@pytest.fixture
def announced(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts, of which nobody names another one; h3 is the one with the broker."""
    token = tmp_path / "metrics-token"
    token.touch(0o600)
    token.write_text(TOKEN)
    settings = {
        **SETTINGS,
        "cluster.peers": "[]",
        "cluster.discovery": '"mqtt"',
        "mqtt.broker": f'"{network.address(3)}"',
        "mqtt.keepalive_s": "2",
        "mqtt.announce_s": "2.0",
        "cluster.metrics_token_file": f'"{token}"',
    }
    with cluster_of([HOST_MEMORY] * 3, HEADROOM, settings) as made:
        yield made


def metrics(cluster: Cluster, source: str, target: str, token: str) -> tuple[int, str]:
    """What a Prometheus on one host gets from the daemon of another one: status and page."""

    def get() -> tuple[int, str]:
        address = (cluster.record.host(target).address, CONTROL_PORT)
        connection = http.client.HTTPSConnection(*address, timeout=WAIT_S, context=client_context())
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return network.call_inside(cluster.name, source, get)


def found(one: Device) -> set[str]:
    """Addresses of the donors that somebody who knows the broker alone finds."""
    rows = json.loads(on_host(one.cluster, "h1", "infiniswap", "status", "--json").stdout)["donors"]
    return {row["address"].partition(":")[0] for row in rows if row["status"] is not None}


def reload_broken_then_mended(cluster: Cluster, host: str, one: Device, file: Path) -> None:
    """An administrator's slip, while pages lie there: told, and nothing else changes."""
    config = cluster.directory(host) / "infiniswap.toml"
    daemon, text = cluster.record.host(host).daemon, config.read_text()
    assert daemon is not None

    def degraded() -> str:
        status = cluster.state(host).status
        return str(status.degraded if status is not None else "")

    config.write_text(f"{text}[devise]\n")
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: "was not reloaded" in degraded(), "word of the broken file")
    one.verify(file)
    config.write_text(text)
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: "was not reloaded" not in degraded(), "the mended file")
    assert cluster.record.host(host).daemon == daemon
    one.verify(file)


@pytest.mark.requires_tool("mosquitto", "promtool")
def test_announced_hosts_are_watched_and_changed_and_lose_their_broker(
    announced: Cluster, tmp_path: Path
) -> None:
    broker = Broker(tmp_path, host=network.address(3), port=1883)
    inside = tuple(announced.command("h3", [], cgroup=False))
    try:
        broker.start(inside)
        logs = [announced.directory(name) / "daemon.log" for name in ("h1", "h2", "h3")]
        until(lambda: all("announced as" in log.read_text() for log in logs), "donors")
        with device(announced) as one:
            one.fill(tmp_path / "data")
            one.until_mapped(tmp_path / "back")
            assert set(one.slabs()) == {"h2", "h3"}  # and not what its own host lends

            assert metrics(announced, "h1", "h2", "a token of somebody else")[0] == 401
            status, page = metrics(announced, "h1", "h2", TOKEN)
            assert status == 200
            check = ["promtool", "check", "metrics"]
            assert not subprocess.run(
                check, input=page, text=True, check=True, capture_output=True
            ).stdout
            assert f'infiniswap_donor_pool_slabs{{state="mapped"}} {one.slabs()["h2"]:.1f}' in page
            reload_broken_then_mended(announced, "h2", one, tmp_path / "back")

            announced.cut("h3")
            try:
                one.verify(tmp_path / "back")
                one.until_mapped(tmp_path / "back", "h2")  # which nobody can announce now
                until(lambda: "broker" in str(one.status["degraded"]), "word of the broker")
                one.verify(tmp_path / "back")
                assert one.slabs()["h2"] == SLABS
            finally:
                announced.heal("h3")
            until(lambda: "broker" not in str(one.status["degraded"]), "the broker")
            until(lambda: set(one.slabs()) >= {"h2", "h3"}, "a donor that announces itself again")
            one.verify(tmp_path / "back")

            broker.kill()
            until(lambda: "broker" in str(one.status["degraded"]), "word of the broker")
            broker.start(inside)  # and has lost what it had retained
            until(lambda: found(one) >= {network.address(n) for n in (1, 2, 3)}, "all of them")
            until(lambda: "broker" not in str(one.status["degraded"]), "the broker")
            one.verify(tmp_path / "back")
            assert one.status["stats"]["requests_failed"] == 0
    finally:
        broker.kill()
