# SPDX-License-Identifier: Apache-2.0
"""`python redis_random.py REDIS MIB READS`: fills a Redis with values of 1000 bytes, then reads
some at random, sixteen at a time. REDIS is Debian's redis-check-rdb, which becomes the server when
it is called redis-server.

Both stay on one processor: they wait for each other, and on two of a virtual machine that takes up
to twice as long, so that the time would depend on where the scheduler puts them.

Prints how many values were there.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VALUE_BYTES = 1000
KEPT_BYTES = 1100
"""What the server takes for a value."""
START_S = 30.0
WRITES, READS = 64, 16


def connected(path: Path) -> socket.socket:
    """A connection to the server, when it serves."""
    end_s = time.monotonic() + START_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            connection.connect(str(path))
            return connection
        connection.close()
        if time.monotonic() > end_s:
            sys.exit("redis-server does not serve")
        time.sleep(0.02)


def ask(path: Path, values: int, reads: int) -> int:
    """Fills and reads; returns how many values were found."""
    chance, found = random.Random(1), 0
    value = chance.randbytes(VALUE_BYTES)
    with connected(path) as connection, connection.makefile("rb") as answers:
        for start in range(0, values, WRITES):
            keys = range(start, min(values, start + WRITES))
            set_one = b"*3\r\n$3\r\nSET\r\n$9\r\nk%08d\r\n$%d\r\n%s\r\n"
            connection.sendall(b"".join(set_one % (key, VALUE_BYTES, value) for key in keys))
            for _ in keys:
                answers.readline()
        for _ in range(0, reads, READS):
            get_one = b"*2\r\n$3\r\nGET\r\n$9\r\nk%08d\r\n"
            wanted = [chance.randrange(values) for _ in range(READS)]
            connection.sendall(b"".join(get_one % key for key in wanted))
            for _ in wanted:
                length = int(answers.readline().removeprefix(b"$"))
                found += len(answers.read(length + 2)) == VALUE_BYTES + 2
    return found


def main(program: str, mebibytes: int, reads: int) -> int:
    """Starts the server, and asks it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before the server, which inherits it
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "socket"
        argv = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
        argv += ["--dir", made, "--loglevel", "warning"]
        with subprocess.Popen(argv, executable=program, stdout=subprocess.DEVNULL) as server:
            try:
                return ask(path, (mebibytes << 20) // KEPT_BYTES, reads)
            finally:
                server.kill()


if __name__ == "__main__":
    redis, size, count = sys.argv[1:]
    print(json.dumps({"check": {"found": main(redis, int(size), int(count))}}))
