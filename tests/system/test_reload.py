# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: what changes while a device pages and a daemon lends, and what a broken file does."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
from pathlib import Path

import pytest
from support.devices import nbd_bytes, nbd_client
from support.devices.cluster import WAIT_S, Cluster, until

from infiniswap.errors import ConfigError
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_native, pytest.mark.timeout(900)]

PAGES, SPAN = 64, MIB


def write(path: Path, **sections: str) -> None:
    """A configuration, whole or not there."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"[{name}]\n{text}\n" for name, text in sections.items()))
    new.replace(path)


class Load:
    """Writes and reads back pages of a device as fast as it can, each with bytes of its own."""

    def __init__(self, path: Path) -> None:
        self.rounds = 0
        self.wrong: list[str] = []
        self._path = path
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with nbd_client.connected(self._path, WAIT_S) as client:
                while not self._end.is_set():
                    for page in range(PAGES):
                        data = struct.pack(">QQ", self.rounds, page) * 256
                        nbd_client.ask(client, nbd_bytes.WRITE, page * SPAN, data)
                    for page in range(PAGES):
                        data = struct.pack(">QQ", self.rounds, page) * 256
                        if nbd_client.ask(client, nbd_bytes.READ, page * SPAN, 4096) != data:
                            self.wrong.append(f"page {page} of round {self.rounds}")
                    self.rounds += 1
        except Exception as error:
            self.wrong.append(repr(error))

    def more(self) -> None:
        """Lets a whole round go by."""
        wanted = self.rounds + 2
        until(lambda: self.rounds >= wanted or self.wrong, "pages to go on moving")
        assert not self.wrong

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        assert not self.wrong


def test_a_device_that_pages_takes_over_what_can_change(cluster: Cluster) -> None:
    path = cluster.root / "device.toml"
    write(path, policy="suspend_s = 3")
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", "--config", str(path))
    load = Load(device.run / "nbd.sock")
    try:
        load.more()
        write(path, policy="suspend_s = 4\nchoices = 3", device="requests_max = 64\nqueues = 1")
        done = device.command("reload")
        assert done.returncode == 0, done.stderr
        assert "reloaded: policy.choices, policy.suspend_s\n" in done.stdout
        assert "a stop and a start: device.requests_max, device.queues" in done.stderr
        waiting = "wait for a stop and a start of the device: device.requests_max, device.queues"
        assert any(waiting in text for text in device.status["degraded"])
        assert waiting in cluster.ok("status", "--donors", cluster.addresses).replace("\n", " ")

        path.write_text("[policy]\nchoices = 2\n[devise]\n")
        device.send(signal.SIGHUP)
        until(
            lambda: any("was not reloaded" in text for text in device.status["degraded"]),
            "the device to have read the broken file",
        )
        refused = device.command("reload")
        assert refused.returncode == ConfigError.exit_code
        assert f"{path}, line 3: unknown section [devise]" in refused.stderr
        load.more()
    finally:
        load.close()
    status = device.wait_standby()
    assert (status["state"], status["stats"]["requests_failed"]) == ("serving", 0)
    assert status["stats"]["pages_in_remote"] > 0

    # A successor goes on with what has been taken over, and with nothing of the broken file.
    os.kill(device.pid, signal.SIGKILL)
    device.wait_take_over(1)
    write(path, policy="suspend_s = 4\nchoices = 3")
    assert "nothing has changed" in cluster.ok("device", "reload", device.name)
    assert device.status["stats"]["requests_failed"] == 0


def test_a_daemon_takes_over_what_can_change(cluster: Cluster) -> None:
    path = cluster.root / "donor.toml"
    write(path, daemon="evict_move_s = 1")
    donor = cluster.donor("--config", str(path))

    def status() -> str:
        return cluster.ok("status", "--json", "--donors", donor.address)

    write(path, daemon="evict_move_s = 2\npreallocate_slabs = 3\nleases_max = 9")
    donor.send(signal.SIGHUP)
    until(
        lambda: "reloaded: daemon.preallocate_slabs, daemon.evict_move_s" in donor.log, "a reload"
    )
    assert "wait for a restart of the daemon: daemon.leases_max" in status()

    path.write_text('[daemon]\npreallocate_slabs = 4\npool = "1x"\n')
    donor.send(signal.SIGHUP)
    until(lambda: "was not reloaded, and nothing has changed" in donor.log, "the broken file")
    assert f"{path}, line 3: daemon.pool: '1x' is not a size" in status()

    write(path, daemon="evict_move_s = 2\npreallocate_slabs = 3\nconnections_max = 40")
    donor.send(signal.SIGHUP)
    until(lambda: "wait for a restart of the daemon: daemon.connections_max" in donor.log, "these")
    write(path, daemon="evict_move_s = 2\npreallocate_slabs = 3")
    donor.send(signal.SIGHUP)
    until(lambda: "reloaded: nothing has changed" in donor.log, "the file as it was")
    (row,) = json.loads(status())["donors"]
    assert not [text for text in row["status"]["degraded"] if "wait for" in text]
