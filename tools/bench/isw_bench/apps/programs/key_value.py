# SPDX-License-Identifier: Apache-2.0
"""`python key_value.py MEMCACHED CLIENT MIX MIB SECONDS`: memcached with that much in values, asked
as in the ETC or SYS mix.

Both run in the job's cgroup; the client's memory is locked, so the server's alone is swapped out.
Prints what the client prints.
"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONNECTIONS = 32
THREADS = 4
START_S = 30.0
ITEM_SHARE = 2.0
"""Memory that memcached may take, of the values': keys, headers, classes of sizes."""


def serves(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def main(memcached: str, client: str, mix: str, mebibytes: float, seconds: float) -> int:
    """Starts the server, asks, ends it; returns the client's exit code."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "socket"
        room = str(int(mebibytes * ITEM_SHARE) + 64)
        server = subprocess.Popen(
            [memcached, "-u", "root", "-s", str(path), "-m", room, "-t", str(THREADS), "-M"]
        )
        try:
            end_s = time.monotonic() + START_S
            while not serves(path):
                if server.poll() is not None or time.monotonic() > end_s:
                    sys.exit("memcached does not serve")
                time.sleep(0.02)
            options = ["--socket", str(path), "--mix", mix, "--run-ms", str(round(seconds * 1000))]
            options += ["--bytes", str(int(mebibytes * 2**20)), "--connections", str(CONNECTIONS)]
            return subprocess.run([client, *options], check=False).returncode
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    server_path, client_path, mix_name, size, duration = sys.argv[1:]
    sys.exit(main(server_path, client_path, mix_name, float(size), float(duration)))
