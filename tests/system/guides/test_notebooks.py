# SPDX-License-Identifier: Apache-2.0
"""docs/howto/notebooks.md: cells that page, in a JupyterLab of root's and in a member's."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, free_port
from support.documents import marked
from support.guides import PAGED, shell, skip_without
from support.machine.ran import ran
from support.machine.usershell import Service, search_path

GUIDE = Path("docs/howto/notebooks.md")
DONOR = "10.0.0.2"
USER, GROUP = "nobody", "games"
TOKEN = "of-a-test"
MIB = 256
CELL = f'data = bytearray(b"x") * ({MIB} << 20); print(data.count(b"x"))'

pytestmark = [*NEEDS_SWAP, pytest.mark.full, pytest.mark.requires_tool("bash", "setpriv")]


class Notebooks:
    """A user's shell in a cluster with one donor, with JupyterLab's settings for tests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.donor = cluster.donor().address
        cluster.root.chmod(0o755)
        self.home = cluster.root / "home"
        self.home.mkdir()
        self.port = free_port()
        settings = {
            "ServerApp": {"allow_root": True, "port": self.port, "port_retries": 0},
            "IdentityProvider": {"token": TOKEN},
        }
        (self.home / "jupyter_server_config.json").write_text(json.dumps(settings))
        entry = pwd.getpwnam(USER)
        for path in (self.home, *self.home.iterdir()):
            os.chown(path, entry.pw_uid, entry.pw_gid)
        places = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        self.env = {
            **cluster.env,
            **{name: str(self.home) for name in (*places, "IPYTHONDIR")},
            "PATH": search_path(cluster.root / "bin", ""),
            "INFINISWAP_DEVICE_GROUP": GROUP,
        }

    def done(self, argv: list[str]) -> str:
        """A command that ends; returns all that it says."""
        done = ran(*argv, env=self.env, cwd=self.home, wait_s=2 * WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def said_by(self, argv: list[str]) -> str:
        """What a JupyterLab has said in which one cell was run."""
        log = self.cluster.root / "lab.log"
        lab = Service(argv, log, f":{self.port}/lab", self.env, self.home)
        try:
            assert asyncio.run(printed(self.port)) == f"{MIB << 20}\n"
        finally:
            lab.end(signal.SIGTERM)
        return lab.log


async def new_kernel(session: aiohttp.ClientSession, base: str) -> str:
    """Its identifier. The server tells its address before it listens there."""
    while True:
        try:
            async with session.post(base) as made:
                return str((await made.json())["id"])
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.05)


async def printed(port: int) -> str:
    """What the cell prints in a new kernel, as JupyterLab's page would ask for it."""
    base = f"http://127.0.0.1:{port}/api/kernels"
    header = {"msg_id": "1", "msg_type": "execute_request", "session": "s", "username": ""}
    request: dict[str, Any] = {"header": {**header, "version": "5.3"}, "channel": "shell"}
    content = {"code": CELL, "silent": False, "store_history": True, "allow_stdin": False}
    request |= {"parent_header": {}, "metadata": {}, "buffers": [], "content": content}
    own = {"Authorization": f"token {TOKEN}"}
    async with asyncio.timeout(2 * WAIT_S), aiohttp.ClientSession(headers=own) as session:
        kernel = await new_kernel(session, base)
        async with session.ws_connect(f"{base}/{kernel}/channels") as channel:
            await channel.send_json(request)
            async for message in channel:
                told = message.json()
                assert told["msg_type"] != "error", told
                if told["msg_type"] == "stream":
                    return str(told["content"]["text"])
    raise AssertionError("the server has closed the channel")


@pytest.fixture
def notebooks(cluster: Cluster) -> Iterator[Notebooks]:
    skip_without(["jupyter"])
    yield Notebooks(cluster)
    assert not cluster.names(), "a device is left"


def test_a_cell_pages_to_donors(notebooks: Notebooks) -> None:
    (block,) = marked(GUIDE, "on", "lab")
    said = notebooks.said_by(shell(block, {DONOR: notebooks.donor}))
    assert PAGED.search(said), said


def test_a_member_needs_no_root(notebooks: Notebooks) -> None:
    (block,) = marked(GUIDE, "on", "administrator")
    notebooks.done(shell(block, {DONOR: notebooks.donor}))
    entry = pwd.getpwnam(USER)
    member = ("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", f"--groups={GROUP}")
    probe = [*member, sys.executable, "-c", "import infiniswap, jupyterlab"]
    readable = subprocess.run(probe, env=notebooks.env, capture_output=True, check=False)
    if readable.returncode:
        pytest.skip("needs a checkout that other users can read")
    try:
        (block,) = marked(GUIDE, "on", "member")
        said = notebooks.said_by([*member, *shell(block, {})])
        assert PAGED.search(said), said
    finally:
        notebooks.cluster.ok("device", "remove", "swap0")


def test_a_notebook_as_a_batch_job_pages_to_donors(notebooks: Notebooks) -> None:
    cell: dict[str, Any] = {"cell_type": "code", "id": "a", "execution_count": None}
    cell |= {"metadata": {}, "outputs": [], "source": CELL}
    text: dict[str, Any] = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (notebooks.home / "prep.ipynb").write_text(json.dumps(text))
    (block,) = marked(GUIDE, "on", "batch")
    said = notebooks.done(shell(block, {DONOR: notebooks.donor}))
    assert PAGED.search(said), said
