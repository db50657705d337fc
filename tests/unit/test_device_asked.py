# SPDX-License-Identifier: Apache-2.0
"""A device whose process did not run for a while: what is asked of it, and what it does then."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infiniswap.control.http import web
from infiniswap.device.api import STOP_PATH
from infiniswap.device.control import client, member_client
from infiniswap.device.control.frozen import FrozenError
from infiniswap.device.process.control_socket import application
from infiniswap.device.spec.rundir import DevicePaths

LISTENS = """
import socket, sys
listeners = [socket.socket(socket.AF_UNIX) for path in sys.argv[1:]]
for listener, path in zip(listeners, sys.argv[1:]):
    listener.bind(path)
    listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stopped() -> Iterator[DevicePaths]:
    """Of a process that is stopped by a signal and whose sockets listen."""
    with tempfile.TemporaryDirectory(prefix="isw-") as name:
        paths = DevicePaths("d", Path(name), Path(name))
        sockets = [str(paths.socket), str(paths.member_socket)]
        process = subprocess.Popen(
            [sys.executable, "-c", LISTENS, *sockets], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield paths
        process.kill()
        process.communicate()


def test_a_process_that_cannot_run_is_asked_nothing(stopped: DevicePaths) -> None:
    with pytest.raises(FrozenError, match=r"stopped by a signal.*kill -CONT"):
        client.stop(stopped, remove=True)
    with pytest.raises(FrozenError, match="cannot answer"):
        member_client.status(stopped)


class Service:
    """Counts stops."""

    def __init__(self) -> None:
        self.stops = 0
        self.runs = SimpleNamespace(pids=list)
        self.spec = SimpleNamespace(name="d", ephemeral=True)
        self.holder = SimpleNamespace(pid=None)

    async def stop(self, **_more: Any) -> None:
        self.stops += 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_stop_is_none_when_who_asked_has_gone(tmp_path: Path, waits: bool) -> None:
    """As after a freeze: the request and the asker's end arrive together."""
    service, path = Service(), str(tmp_path / "s")
    body = b'{"remove":false}'
    head = f"POST {STOP_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    async def ask() -> None:
        runner = web.AppRunner(application(service), access_log=None, handle_signals=False)  # type: ignore[arg-type]
        await runner.setup()
        await web.UnixSite(runner, path).start()
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(path)
            asker.sendall(head.encode() + body)
            if not waits:
                asker.close()
            server = runner.server
            assert server is not None
            async with asyncio.timeout(60):
                while not (  # noqa: ASYNC110 - aiohttp tells nobody
                    service.stops or (server.requests_count and not server.connections)
                ):
                    await asyncio.sleep(0.01)
        await runner.cleanup()

    asyncio.run(ask())
    assert service.stops == int(waits)
