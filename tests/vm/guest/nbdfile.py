# SPDX-License-Identifier: Apache-2.0
"""Device processes whose contents outlive them: a file behind the front end nbd.

    nbdfile.py RUN_DIR FILE

For each line that it reads, "attach" or "take-over", a child is forked (an interpreter takes many
seconds to start in a virtual machine) that writes "ready PID PATH" when it serves, and serves until
it is killed; SIGTERM detaches. After "wait" the next child has ended: "ended PID". The children
stand in for the engine where the question is what the kernel does when a process dies: an answered
write is in the file, which is memory of nobody's, and nothing else is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from infiniswap.device.frontends.nbd import NbdKernel
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.protocol import FrontendConfig, FrontendInfo
from infiniswap.errors import InfiniswapError
from infiniswap.system.process import make_swap_safe
from infiniswap.system.signals import open_signalfd, poll
from infiniswap.units import PAGE_BYTES

_REQUEST = struct.Struct(">IHH8sQI")
_REPLY = struct.Struct(">II8s")
_REPLY_MAGIC = 0x67446698
_LIBC, _OFFSET = ctypes.CDLL(None, use_errno=True), ctypes.c_longlong
_PUNCH = 1 | 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_REPAIR_S = 0.5
_READ, _WRITE, _DISC, _FLUSH, _TRIM, _ZEROES = 0, 1, 2, 3, 4, 6


class FileDisk:
    """An engine, as far as the front end needs one, and its frontend."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._live = 0
        self._lock = threading.Lock()

    def frontend(self, kind: str, config: FrontendConfig) -> FileDisk:
        assert kind == "nbd"
        assert config.request_bytes_max >= PAGE_BYTES
        return self

    def serve(self, descriptor: int) -> None:
        with self._lock:
            self._live += 1
        connection = socket.socket(fileno=os.dup(descriptor))
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def info(self) -> FrontendInfo:
        with self._lock:
            return FrontendInfo(os.fstat(self._fd).st_size, 128, connections=self._live)

    def close(self) -> None:
        """The kernel has ended the connections."""

    def _serve(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        try:
            while header := stream.read(_REQUEST.size):
                _magic, _flags, command, cookie, offset, length = _REQUEST.unpack(header)
                data = b""
                if command == _DISC:
                    break
                if command == _READ:
                    data = os.pread(self._fd, length, offset)
                elif command == _WRITE:
                    os.pwrite(self._fd, stream.read(length), offset)
                elif command in (_TRIM, _ZEROES):
                    self._punch(offset, length)
                connection.sendall(_REPLY.pack(_REPLY_MAGIC, 0, cookie) + data)
        except (OSError, struct.error):
            pass  # the kernel has shut it down
        finally:
            stream.close()
            connection.close()
            with self._lock:
                self._live -= 1

    def _punch(self, offset: int, length: int) -> None:
        """At once, however much it is: the kernel's patience with an answer is short."""
        assert _LIBC.fallocate(self._fd, _PUNCH, _OFFSET(offset), _OFFSET(length)) == 0


def serve(how: str, run: Path, file: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    disk: Any = FileDisk(file)
    device = NbdKernel(DevicePaths(run.name, run, run))
    if how == "take-over":
        device.prepare(disk, b"")
        device.take_over({})
    else:
        device.attach(disk)
    make_swap_safe()
    print("ready", os.getpid(), device.path, flush=True)
    ending = {open_signalfd([signal.SIGTERM]): select.POLLIN}
    while not poll(ending, _REPAIR_S):
        with contextlib.suppress(InfiniswapError):
            device.repair()  # on a machine that is too slow for the kernel's patience
    device.detach()


def main(run: str, file: str) -> None:
    for line in sys.stdin:
        if line == "wait\n":
            print("ended", os.wait()[0], flush=True)
        elif os.fork() == 0:
            try:
                serve(line.strip(), Path(run), Path(file))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
