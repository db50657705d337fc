# SPDX-License-Identifier: Apache-2.0
"""Under a systemd: daemon and device as `infiniswap service install` makes them, and a job that
swaps. It ends when there are pages on the device, so that a shutdown can follow.

    python shutdown_probe.py FRONTEND DIRECTORY PAGECHECK
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from infiniswap.system import swap
from infiniswap.units import MIB

NAME = "down"
PORT = 9471
CONFIG = Path("/etc/infiniswap")
SWAPPED_BYTES = 8 * MIB


def run(*argv: str) -> None:
    """Shows what it says, and fails with it."""
    print("+", *argv, flush=True)
    subprocess.run(argv, check=True, timeout=900)


def settings(frontend: str, directory: Path) -> None:
    """As an administrator writes them, but for places and sizes of a test."""
    (CONFIG / "devices").mkdir(parents=True)
    (CONFIG / "infiniswap.toml").write_text(
        f'[daemon]\nlisten = "127.0.0.1:{PORT}"\npool = "128M"\nslab = "8M"\nheadroom = "16M"\n'
        f'[device]\nslab = "8M"\nbackup_dir = "{directory}"\n'
    )
    (CONFIG / "devices" / f"{NAME}.env").write_text(
        f"DEVICE_OPTIONS=--size 64M --frontend {frontend} --swap --donors 127.0.0.1:{PORT}\n"
    )
    for unit in ("infiniswapd.service", f"infiniswap-device@{NAME}.service"):
        drop_in = Path("/run/systemd/system") / f"{unit}.d"
        drop_in.mkdir()
        (drop_in / "log.conf").write_text(
            f"[Service]\nStandardError=append:{directory}/{unit}.log\n"
        )


def main(frontend: str, directory: Path, pagecheck: str) -> None:
    settings(frontend, directory)
    run(sys.executable, "-m", "infiniswap", "service", "install")
    run("systemctl", "start", "infiniswapd.service")
    run("systemctl", "start", f"infiniswap-device@{NAME}.service")
    job = ["systemd-run", "--unit=isw-job", "-p", "MemoryMax=16M", pagecheck, "48", "1", "100000"]
    run(*job)
    node = Path("/dev/infiniswap", NAME).resolve()
    end_s = time.monotonic() + 600
    while (area := swap.find_area(node)) is None or area.used_bytes < SWAPPED_BYTES:
        assert time.monotonic() < end_s, area
        time.sleep(0.1)
    run("systemctl", "--no-pager", "--plain", "list-units", "infini*", "isw*", "*.swap")
    print(f"SERVES {node} {area.used_bytes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
