# SPDX-License-Identifier: Apache-2.0
"""Under a systemd: daemon and device as `infiniswap service install` makes them; a job of root's
and one of a member's on that device; then one that swaps, which is there when the host shuts down.

    python services_probe.py FRONTEND DIRECTORY PAGECHECK
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from runwatch import GROUP, as_user, make_user, run_argv, watch

from infiniswap.device.rundir import paths_of
from infiniswap.system import swap, systemd
from infiniswap.units import MIB

NAME = "down"
MEMBER = "isw-carol"
PORT = 9471
CONFIG = Path("/etc/infiniswap")
DEVICE = f"infiniswap-device@{NAME}.service"
SWAPPED_BYTES = 8 * MIB
TERMINAL = """
cgroup=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/app.slice
mkdir $cgroup && echo $$ > $cgroup/cgroup.procs && exec "$@"
"""
"""A terminal of a user's desktop: in what the user's own systemd calls a slice."""


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
    for unit in ("infiniswapd.service", DEVICE):
        drop_in = Path("/run/systemd/system") / f"{unit}.d"
        drop_in.mkdir()
        (drop_in / "log.conf").write_text(
            f"[Service]\nStandardError=append:{directory}/{unit}.log\n"
        )


def device_unit() -> str:
    """What systemd knows of the device: whether it runs, which process it is, restarts."""
    show = ["systemctl", "show", "--property=ActiveState,MainPID,NRestarts", DEVICE]
    return subprocess.run(show, check=True, capture_output=True, text=True).stdout


def job(who: str, uid: int, directory: Path, argv: list[str]) -> None:
    """Runs one until it has paged, and tells what was seen."""
    environment = {key: value for key, value in os.environ.items() if "INFINISWAP" not in key}
    before = device_unit()
    process = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    seen: dict[str, Any] = watch(process, paths_of(NAME, Path("/run/infiniswap"), directory))
    seen["units_left"] = list(systemd.units("*infiniswap_run*"))
    seen |= {"asked_for": uid, "device_before": before, "device_after": device_unit()}
    print(f"SEEN {who} {json.dumps(seen)}", flush=True)


def reload() -> None:
    """While a job swaps: what can change does, and a mistake is told and changes nothing."""
    path = CONFIG / "infiniswap.toml"
    right = path.read_text()
    path.write_text(f"{right}[policy]\nchoices = 3\nevict_slabs_max = 3\n")
    run("systemctl", "reload", "infiniswapd.service", DEVICE)
    path.write_text(f"{right}[polisy]\n")
    done = subprocess.run(["systemctl", "reload", DEVICE], check=False, timeout=900)
    assert done.returncode != 0
    path.write_text(right)
    run("systemctl", "is-active", "infiniswapd.service", DEVICE)


def main(frontend: str, directory: Path, pagecheck: Path) -> None:
    settings(frontend, directory)
    run(sys.executable, "-m", "infiniswap", "service", "install")
    run("systemctl", "enable", "infiniswapd.service", DEVICE)
    run("systemctl", "start", "multi-user.target")  # as at boot: nobody names them
    run("systemctl", "is-active", "infiniswapd.service", DEVICE)
    command = run_argv(pagecheck, "--device", NAME)
    job("root", 0, directory, command)
    uid = make_user(MEMBER, GROUP)
    terminal = ["systemd-run", "--scope", "--property=Delegate=yes", f"--slice=user-{uid}.slice"]
    terminal += ["sh", "-c", TERMINAL, "sh", *as_user(MEMBER)]
    job("member", uid, directory, [*terminal, *command])
    swapping = ["systemd-run", "--unit=isw-job", "-p", "MemoryMax=16M"]
    run(*swapping, str(pagecheck), "48", "1", "100000")
    node = Path("/dev/infiniswap", NAME).resolve()
    end_s = time.monotonic() + 600
    while (area := swap.find_area(node)) is None or area.used_bytes < SWAPPED_BYTES:
        assert time.monotonic() < end_s, area
        time.sleep(0.1)
    reload()
    run("systemctl", "--no-pager", "--plain", "list-units", "infini*", "isw*", "*.swap")
    print(f"SERVES {node} {area.used_bytes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
