# SPDX-License-Identifier: Apache-2.0
"""[daemon.slo] with a real Redis on the donor's host, measured by redis-benchmark."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import SLAB, WAIT_S, Cluster, Donor, run, until

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_tool("redis-benchmark", "redis-check-rdb", "nbdcopy"),
    pytest.mark.full,
]

SLABS = 6


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[Path]:
    """A server on a socket. Debian's redis-tools have the program, under another name."""
    program, socket = directory / "redis-server", directory / "redis.sock"
    program.symlink_to("/usr/bin/redis-check-rdb")
    argv: list[str | Path] = [
        program,
        "--port",
        "0",
        "--unixsocket",
        socket,
        "--save",
        "",
        "--dir",
        directory,
    ]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as server:
        try:
            until(socket.exists, "Redis to serve")
            yield socket
        finally:
            server.terminate()


def protected(cluster: Cluster, socket: Path, factor: Path) -> Donor:
    """A daemon that protects that Redis: the number is p99 of 200 requests, in ms, many times."""
    script, settings = cluster.root / "p99", cluster.root / "settings.toml"
    script.write_text(
        f"#!/bin/sh\nredis-benchmark -s {socket} -t get -n 200 -c 2 --csv --precision 3 |\n"
        f"    tail -1 | tr -d '\"' | awk -F, -v times=$(cat {factor}) '{{ print $7 * times }}'\n"
    )
    script.chmod(0o755)
    settings.write_text(f'[daemon.slo]\ncommand = "{script}"\nbound = 1e6\nsettle_s = 4\n')
    return cluster.donor("--config", str(settings))


def mapped(cluster: Cluster, donor: Donor) -> int:
    return int(cluster.donor_row(donor)["status"]["pool"]["slabs_mapped"])


def test_slabs_go_back_while_a_redis_is_slow_and_no_page_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    factor = tmp_path / "factor"
    factor.write_text("1")
    data, back = tmp_path / "data", tmp_path / "back"
    data.write_bytes(secrets.token_bytes(SLABS * SLAB))
    with redis(tmp_path) as socket:
        donor = protected(cluster, socket, factor)
        device = cluster.start("--frontend", "nbd-socket", size=str(SLABS * SLAB))

        def is_lent(slabs: int) -> bool:
            run("nbdcopy", data, device.uri)
            return mapped(cluster, donor) >= slabs

        until(lambda: is_lent(SLABS), "every slab to be lent")
        factor.write_text("1000000000")
        until(lambda: not mapped(cluster, donor), "every slab to go back")
        assert "protects a service of its host" in cluster.donor_row(donor)["status"]["no_room"]
        run("nbdcopy", device.uri, back)
        assert back.read_bytes() == data.read_bytes()
        assert not is_lent(1)
        factor.write_text("1")
        until(lambda: is_lent(1), "a slab to be lent again", 3 * WAIT_S)
        for event in ("service-in-danger", "service-well"):
            assert f"[{event}]" in donor.log
