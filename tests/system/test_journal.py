# SPDX-License-Identifier: Apache-2.0
"""Log lines in systemd's own journal: a journald of the test's, in a mount namespace, and daemon
and device connected to it as systemd connects services (systemd-cat)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import nbd_bytes, nbd_client
from support.devices.cluster import WAIT_S, Cluster, Device, until

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_tool("systemd-cat", "journalctl", "unshare", "nsenter", "mount"),
    pytest.mark.timeout(300),
]

START = """set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/systemd/journal /run/log/journal /run/systemd/journald.conf.d
printf '[Journal]\\nReadKMsg=no\\nAudit=\\n' >/run/systemd/journald.conf.d/test.conf
exec /lib/systemd/systemd-journald
"""
# What systemd gives to a service beside the stream; systemd-cat of Debian 12 does not.
AS_SERVICE = """
JOURNAL_STREAM=$(stat --dereference --format=%d:%i /proc/$$/fd/2)
export JOURNAL_STREAM
exec "$@"
"""


class Journal:
    """A running journald.

    Attributes:
        enter: a command that executes another one where the journal is the host's.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.enter = ("nsenter", f"--mount=/proc/{process.pid}/ns/mnt")
        self._root = Path("/proc", str(process.pid), "root")

    def is_ready(self) -> bool:
        """Whether it listens, where only those in its namespace see it."""
        there = self._root / "run/systemd/journal"
        return (there / "socket").exists() and (there / "stdout").exists()

    def find(self, **fields: str) -> list[dict[str, str]]:
        """The entries that have all of those fields."""
        wanted = [f"{name}={value}" for name, value in fields.items()]
        done = subprocess.run(
            [*self.enter, "journalctl", "--directory=/run/log/journal", "--output=json", *wanted],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )  # exits with 1 where there are none
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait(self, **fields: str) -> dict[str, str]:
        """The first entry that has all of those fields."""
        found = until(lambda: self.find(**fields), f"an entry with {fields}")
        assert isinstance(found, list)
        return dict(found[0])


@pytest.fixture
def journal() -> Iterator[Journal]:
    command = ["unshare", "--mount", "sh", "-c", START]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = Journal(process)
        until(found.is_ready, "a journal")
        assert process.poll() is None
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()


def test_events_can_be_searched_for_by_what_they_are_about(
    journal: Journal, cluster: Cluster
) -> None:
    as_service = (*journal.enter, "systemd-cat", "--identifier=unit", "sh", "-c", AS_SERVICE, "sh")
    config = cluster.root / "donor.toml"
    config.write_text("")
    donor = cluster.donor("--config", str(config), prefix=as_service)
    name = cluster.name()
    command = [sys.executable, "-m", "infiniswap", "device", "start", name, "--foreground"]
    command += ["--donors", donor.address, "--size", "16M", "--frontend", "nbd-socket"]
    device = subprocess.Popen([*as_service, *command], env=cluster.env, stdin=subprocess.DEVNULL)
    try:
        served = journal.wait(
            SYSLOG_IDENTIFIER="infiniswap-device", INFINISWAP_DEVICE=name, PRIORITY="6"
        )
        assert str(device.pid) != served["_PID"], "its starter's"

        # What a daemon tells: by its event, with the journal's own fields and catalog number.
        config.write_text("[daemon]\npoll = 1\n")
        donor.send(signal.SIGHUP)
        broken = journal.wait(INFINISWAP_EVENT="config-broken")
        assert broken["SYSLOG_IDENTIFIER"] == "infiniswapd"
        assert (broken["PRIORITY"], broken["_PID"]) == ("3", str(donor.process.pid))
        assert f"{config}, line 2: unknown key daemon.poll" in broken["MESSAGE"]
        assert journal.find(MESSAGE_ID=broken["MESSAGE_ID"]) == [broken]

        # What a device tells: by the donor that it is about.
        until((cluster.run_dir / name / "control.sock").is_socket, "a device that answers")
        with nbd_client.connected(cluster.run_dir / name / "nbd.sock", WAIT_S) as client:

            def is_mapped() -> object:
                nbd_client.ask(client, nbd_bytes.WRITE, 0, bytes(range(256)) * 256)
                return Device(cluster, name).status["slabs"]["mapped"]

            until(is_mapped, "a slab on the donor")
        donor.end(signal.SIGKILL)

        def lost() -> list[dict[str, str]]:
            """Which of both comes, or comes first, is a matter of moments."""
            events = {"donor-session-lost", "donor-suspended"}
            about = journal.find(INFINISWAP_DONOR=donor.address)
            return [entry for entry in about if entry["INFINISWAP_EVENT"] in events]

        first = until(lost, "the loss of a donor")[0]
        assert (first["INFINISWAP_DEVICE"], first["PRIORITY"]) == (name, "4")
        assert journal.find(INFINISWAP_DONOR="10.0.0.2:9400") == []
    finally:
        device.terminate()
        assert device.wait(WAIT_S) == 0
    # By journald's own protocol; only what the starter says to whoever called it is plain text.
    plain = journal.find(SYSLOG_IDENTIFIER="unit")
    assert {entry["_PID"] for entry in plain} == {str(device.pid)}
    cluster.ok("device", "remove", name)
