# SPDX-License-Identifier: Apache-2.0
"""What every user of a donor's host may read without a proof: status, metrics, who answers.

On a Unix socket, for a daemon that has no configured secret and so serves this host alone. Nothing
can be borrowed or drained through it. Places are counted by user (SO_PEERCRED).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from pathlib import Path

from infiniswap import __version__
from infiniswap.config import LOCAL_DIR
from infiniswap.control import messages as m
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.http import aiohttp, web
from infiniswap.control.port import HttpPort, PortLimits, json_answer
from infiniswap.control.scrape import answer
from infiniswap.control.service import Service
from infiniswap.errors import NoDonorError, ProtocolMismatchError
from infiniswap.units import HostPort

_LIMITS = PortLimits(connections_max=64, connections_per_host_max=8, stop_s=1.0)
_SUFFIX = ".sock"


def local_path(run_dir: Path, listen: HostPort) -> Path:
    """The socket of the daemon that listens there: two may have one port on two addresses."""
    return run_dir / LOCAL_DIR / f"{listen}{_SUFFIX}"


class LocalPort:
    """Serves one service on one socket.

    Args:
        service: the donor.
        counters: as those of HttpPort.
    """

    def __init__(self, service: Service, counters: Counter[str]) -> None:
        self._service = service
        self._port = HttpPort(_LIMITS, counters)
        self._path: Path | None = None
        self._port.router.add_get(m.STATUS_PATH, self._status)
        self._port.router.add_get(m.VERSION_PATH, self._version)
        self._port.router.add_get(METRICS_PATH, self._metrics)

    async def start(self, path: Path) -> None:
        """Listens and serves.

        Raises:
            NotPermittedError, SystemCallError: the socket cannot be made.
        """
        await self._port.start_local(path)
        self._path = path

    async def stop(self) -> None:
        """Ends in bounded time, and removes the socket. Idempotent."""
        path, self._path = self._path, None
        await self._port.stop()
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # Python 3.13 and later have done it
            with contextlib.suppress(OSError):  # others may have something there, or own it
                path.parent.rmdir()
                path.parent.parent.rmdir()

    async def _status(self, _request: web.Request) -> web.Response:
        await self._service.refresh()
        return json_answer(self._service.status())

    async def _version(self, _request: web.Request) -> web.Response:
        return json_answer(
            m.VersionInfo(product="infiniswap", software=__version__, versions=list(m.VERSIONS))
        )

    async def _metrics(self, _request: web.Request) -> web.Response:
        return await answer(self._service.figures)


async def fetch_local_status(path: Path, wait_s: float) -> m.Status:
    """The state of this host's daemon, without a secret.

    Raises:
        NoDonorError, ProtocolMismatchError: it does not answer, or something else does.
    """
    connector = aiohttp.UnixConnector(str(path))
    try:
        async with (
            asyncio.timeout(wait_s),
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as http,
            http.get(f"http://donor{m.STATUS_PATH}", allow_redirects=False) as response,
        ):
            body = await response.content.read(m.MESSAGE_BYTES_MAX + 1)
            while len(body) <= m.MESSAGE_BYTES_MAX and (more := await response.content.readany()):
                body += more
            if response.status == 200 and len(body) <= m.MESSAGE_BYTES_MAX:
                return m.decode_body(body, m.Status)
            raise ProtocolMismatchError(f"HTTP status {response.status}", where=str(path))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise NoDonorError(
            f"the daemon does not answer ({error or type(error).__name__})",
            where=str(path),
            mend="It may have ended.",
        ) from error


def remove_stale(run_dir: Path) -> None:
    """Removes the sockets of daemons that were killed. Blocking, for a moment."""
    for path in (run_dir / LOCAL_DIR).glob(f"*{_SUFFIX}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    with contextlib.suppress(OSError):
                        path.unlink()
    with contextlib.suppress(OSError):
        (run_dir / LOCAL_DIR).rmdir()
