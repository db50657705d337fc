# SPDX-License-Identifier: Apache-2.0
"""Names with bytes that are no UTF-8: directories, variables, the host's own name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster
from support.machine.ran import ran

from infiniswap import config as configuration
from infiniswap.donor.identity import make_identity
from infiniswap.errors import ConfigError
from infiniswap.units import HostPort

pytestmark = pytest.mark.requires_native

BAD = os.fsdecode(b"d\xff")


def said(done: subprocess.CompletedProcess[str]) -> str:
    text = " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in text
    assert "UnicodeEncodeError" not in text
    return text


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / BAD
    made.mkdir()
    return made


@pytest.fixture
def renamed_host() -> Iterator[tuple[str, ...]]:
    """The beginning of a command line on a host with such a name."""
    script = "import socket, sys, time; socket.sethostname(b'h\\xffst'); print(flush=True); "
    script += "time.sleep(3600)"
    command = ("unshare", "--uts", sys.executable, "-c", script)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == b"\n"
            yield ("nsenter", f"--target={keeper.pid}", "--uts", "--")
        finally:
            keeper.kill()


@pytest.mark.parametrize(
    "key", ["daemon.name", "daemon.run_dir", "device.run_dir", "device.backup_dir", "slo.command"]
)
def test_a_variable_that_is_not_utf8_is_named(key: str) -> None:
    if key == "slo.command":  # which only a file may give
        key = "cluster.secret_file"
    name = configuration.env_name(key)
    with pytest.raises(ConfigError, match=r"is not UTF-8") as raised:
        configuration.load(Path("/dev/null"), {}, {name: f"/x/{BAD}"})
    assert raised.value.where == f"environment variable {name}"
    assert raised.value.what == rf"{key}: '/x/d\udcff' is not UTF-8"


def test_commands_work_in_a_directory_that_is_not_utf8(cluster: Cluster, directory: Path) -> None:
    path = directory / "infiniswap.toml"
    path.write_text('[daemon]\nslab = "4M"\n[device]\nslab = "4M"\n')
    for command in (("config", "check"), ("status",), ("doctor",), ("doctor", "--json")):
        argv = (*cluster.program, *command, "--config", str(path))
        done = ran(*argv, env=cluster.env, cwd=directory, wait_s=WAIT_S)
        assert done.returncode in (0, 3, 5, 6), said(done)
        said(done)
    job = directory / os.fsdecode(b"job\xff")
    job.write_text("#!/bin/sh\n")
    job.chmod(0o755)
    argv = (*cluster.program, "run", "--dry-run", "--local", "32M", "--size", "64M")
    said(ran(*argv, "--", str(job), BAD, env=cluster.env, cwd=directory, wait_s=WAIT_S))


def test_what_would_be_written_down_is_refused_by_name(cluster: Cluster, directory: Path) -> None:
    done = ran(
        *(*cluster.program, "init", "--config", str(directory / "new.toml")),
        env=cluster.env,
        wait_s=WAIT_S,
    )
    assert done.returncode == 2
    assert r"d\udcff' is not UTF-8. Use a name in UTF-8" in said(done)
    assert not list(directory.iterdir())
    donor = cluster.donor()
    for option in ("--config", "--backup"):
        path = directory / "infiniswap.toml"
        path.write_text("")
        start = ("device", "start", "d1", "--size", "8M", "--frontend", "nbd-socket")
        done = cluster.cli(*start, "--donors", donor.address, option, str(path))
        assert done.returncode == 2, said(done)
        assert r"infiniswap.toml' is not UTF-8" in said(done)
    assert cluster.names() == []


@pytest.mark.requires_root
def test_a_host_whose_name_is_not_utf8_lends_and_borrows(
    cluster: Cluster, renamed_host: tuple[str, ...], tmp_path: Path
) -> None:
    donor = cluster.donor(prefix=renamed_host)
    row = cluster.donor_row(donor)
    assert row["status"]["donor_name"] == "h?st"
    start = ("device", "start", "d1", "--size", "8M", "--frontend", "nbd-socket")
    for command in (
        (*start, "--donors", donor.address),
        ("device", "show", "d1"),
        ("status", "--donors", donor.address),
        ("doctor", "--donors", donor.address),
        ("donor", "leases", donor.address),
        ("init", "--config", str(tmp_path / "new.toml")),
        ("device", "remove", "d1"),
    ):
        done = ran(*renamed_host, *cluster.program, *command, env=cluster.env, wait_s=2 * WAIT_S)
        assert done.returncode == 0 or command[0] == "doctor", said(done)
        said(done)
    assert "on h?st." in (tmp_path / "new.toml").read_text()
    assert "Traceback" not in donor.log
    assert json.loads(cluster.ok("status", "--json", "--donors", donor.address))["devices"] == []


def test_a_donor_keeps_its_identity_over_restarts() -> None:
    first, again = (make_identity("", HostPort("127.0.0.1", 9400)) for _ in range(2))
    assert first.donor_id == again.donor_id
