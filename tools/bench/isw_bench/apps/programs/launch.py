# SPDX-License-Identifier: Apache-2.0
"""`python launch.py REPORT PAUSE_S COMMAND...`: runs a job and reports what it took.

Every rival starts its jobs with this, inside the job's cgroup, so that all are timed alike, from
the start of the program until the kernel has taken it away. It imports little, as it counts
against the job's limit. The job starts after the pause. The last line that the command prints goes
into the report.
"""

import json
import os
import sys
import time


def main(report: str, pause_s: float, command: list[str]) -> int:
    """Runs the command; returns its exit code."""
    time.sleep(pause_s)
    reading, writing = os.pipe()
    start_s = time.monotonic()
    pid = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, writing, 1),
            (os.POSIX_SPAWN_CLOSE, reading),
            (os.POSIX_SPAWN_CLOSE, writing),
        ],
    )
    os.close(writing)
    said = b""
    while data := os.read(reading, 65536):
        said = (said + data)[-65536:]
    _, status, usage = os.wait4(pid, 0)
    elapsed_s = time.monotonic() - start_s
    lines = said.decode(errors="replace").strip().splitlines()
    found = {
        "elapsed_s": elapsed_s,
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "code": os.waitstatus_to_exitcode(status),
        "said": lines[-1] if lines else "",
    }
    with open(report + ".new", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.rename(report + ".new", report)
    return 1 if found["code"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
