# SPDX-License-Identifier: Apache-2.0
"""Under a systemd that then shuts down: a device that was started from a session, and a job whose
pages do not fit back into memory as long as it runs, which it does until it is killed.

    python poweroff_probe.py DEVICE JOB... -- COMMAND...
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from infiniswap.system import swap
from infiniswap.units import MIB

SESSION = ("systemd-run", "--scope", "--quiet", "--slice=user-0.slice", "--unit=session-9.scope")
JOB = ("systemd-run", "--unit=isw-job", "-p", "MemoryMax=16M", "-p", "TimeoutStopSec=10")
DEAF = ("-p", "KillSignal=SIGCONT")
SWAPPED_BYTES = 8 * MIB
WAIT_S = 600.0


def main(name: str, words: list[str]) -> None:
    at = words.index("--")
    subprocess.run([*SESSION, *words[at + 1 :]], check=True, timeout=WAIT_S)
    subprocess.run([*JOB, *DEAF, *words[:at]], check=True, timeout=WAIT_S)
    node = Path("/dev/infiniswap", name).resolve()
    end_s = time.monotonic() + WAIT_S
    while (area := swap.find_area(node)) is None or area.used_bytes < SWAPPED_BYTES:
        assert time.monotonic() < end_s, area
        time.sleep(0.1)
    print(f"SERVES {time.monotonic()} {area.used_bytes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
