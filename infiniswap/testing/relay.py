# SPDX-License-Identifier: Apache-2.0
"""A TCP relay between two ends of a test, which can be stalled and cut."""

from __future__ import annotations

import asyncio
import contextlib

from infiniswap.units import HostPort

_CHUNK_BYTES = 64 * 1024


class LossyLink:
    """Relays connections to one address. An async context manager.

    Args:
        target: where connections go.
    """

    def __init__(self, target: HostPort) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self.address = HostPort("127.0.0.1", 0)

    async def __aenter__(self) -> LossyLink:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = int(self._server.sockets[0].getsockname()[1])
        self.address = HostPort("127.0.0.1", port)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stall(self) -> None:
        """Moves no more bytes; connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        """Moves bytes again, also those that waited."""
        self._flowing.set()

    def cut(self, *, refuse: bool = False) -> None:
        """Resets every connection; with `refuse` also every new one until `mend`."""
        self._refusing = refuse
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        """Accepts connections again."""
        self._refusing = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(source, sink), name="relay")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(_CHUNK_BYTES):
                    await self._flowing.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.close()
