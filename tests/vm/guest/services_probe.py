# SPDX-License-Identifier: Apache-2.0
"""Under a systemd: daemon and device as `infiniswap service install` makes them; a job of root's
and one of a member's on that device; then one that swaps, which is there when the device's process
is killed, the daemon restarted, and the device, and when the host shuts down.

    python services_probe.py FRONTEND DIRECTORY PAGECHECK
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.jobs.runwatch import GROUP, as_user, make_user, run_argv, watch
from support.machine.stopping import stopped

from infiniswap.device.control import client
from infiniswap.device.spec.rundir import DevicePaths, paths_of
from infiniswap.errors import InfiniswapError
from infiniswap.own_code import CODE_OWNER
from infiniswap.system import swap, systemd
from infiniswap.units import MIB

NAME = "down"
MEMBER = "isw-carol"
PORT = 9471
CONFIG = Path("/etc/infiniswap")
DEVICE = f"infiniswap-device@{NAME}.service"
SWAPPED_BYTES = 8 * MIB
WAIT_S = 900.0
PAGES_BETWEEN = 100
BACK = "back with the same lease"
PATIENCE = "600"
"""Seconds for a daemon that is restarted: without KVM it takes many."""
TERMINAL = """
cgroup=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/app.slice
mkdir $cgroup && echo $$ > $cgroup/cgroup.procs && exec "$@"
"""
"""A terminal of a user's desktop: in what the user's own systemd calls a slice."""


def run(*argv: str) -> None:
    """Shows what it says, and fails with it."""
    print("+", *argv, flush=True)
    subprocess.run(argv, check=True, timeout=900)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits until it is true, and returns it; a device between two processes cannot be asked."""
    end_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(InfiniswapError):
            if value := condition():
                return value
        assert time.monotonic() < end_s, f"waited in vain for: {what}"
        time.sleep(0.1)


def settings(frontend: str, directory: Path) -> None:
    """As an administrator writes them, but for places, sizes and times of a test."""
    (CONFIG / "devices").mkdir(parents=True)
    run(sys.executable, "-m", "infiniswap", "init", "--secret", str(CONFIG / "secret"))
    (CONFIG / "infiniswap.toml").write_text(
        f'[cluster]\nsecret_file = "{CONFIG}/secret"\n'
        f'[daemon]\nlisten = "127.0.0.1:{PORT}"\npool = "128M"\nslab = "8M"\nheadroom = "16M"\n'
        f"lease_grace_s = {PATIENCE}\n"
        f'[device]\nslab = "8M"\nbackup_dir = "{directory}"\n[policy]\nsuspend_s = {PATIENCE}\n'
    )
    (CONFIG / "devices" / f"{NAME}.env").write_text(
        f"DEVICE_OPTIONS=--size 64M --frontend {frontend} --swap --donors 127.0.0.1:{PORT}\n"
    )
    for unit in ("infiniswapd.service", DEVICE):
        drop_in = Path("/run/systemd/system") / f"{unit}.d"
        drop_in.mkdir(exist_ok=True)
        (drop_in / "log.conf").write_text(
            f"[Service]\nStandardError=append:{directory}/{unit}.log\n"
        )


def device_unit() -> str:
    """What systemd knows of the device: whether it runs, which process it is, restarts."""
    show = ["systemctl", "show", "--property=ActiveState,MainPID,NRestarts", DEVICE]
    return subprocess.run(show, check=True, capture_output=True, text=True).stdout


def rights() -> None:
    """Tells what the kernel says of each process of the services, and what root has prepared."""
    seen: dict[str, Any] = {}
    paths = paths_of(NAME, Path("/run/infiniswap"), Path("/"))
    until(lambda: status_of(paths).standby == "ready", "a standby")
    for unit in ("infiniswapd.service", DEVICE):
        show = ["systemctl", "show", "--value", "--property=ControlGroup", unit]
        cgroup = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
        pids = Path(f"/sys/fs/cgroup{cgroup}/cgroup.procs").read_text().split()
        seen[unit] = [process_rights(Path("/proc", pid)) for pid in pids]
    copies = Path("/run/infiniswapd/copies")
    seen["copies"] = {path.name: (path.owner(), path.stat().st_mode) for path in copies.iterdir()}
    print(f"SEEN rights {json.dumps(seen)}", flush=True)


def status_of(paths: DevicePaths) -> Any:
    """Of the device's take-overs."""
    return client.status(paths).succession


def process_rights(proc: Path) -> dict[str, Any]:
    """Of one process, and of each of its threads what can differ."""
    status = dict(line.partition(":\t")[::2] for line in (proc / "status").read_text().splitlines())
    keys = (
        "Name",
        "Uid",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
    )
    threads = [path.read_text().rpartition(")")[2].split() for path in proc.glob("task/*/stat")]
    return {
        **{key: status[key] for key in keys},
        "locked": int(status["VmLck"].split()[0]),
        "oom_score_adj": int((proc / "oom_score_adj").read_text()),
        # Fields 9 (flags) and 40 (real-time priority) of proc(5), from the third on.
        "io_flushers": sum(bool(int(fields[6]) & 0x80000) for fields in threads),
        "real_time": sum(fields[37] == "1" for fields in threads),
    }


def job(who: str, uid: int, directory: Path, argv: list[str]) -> None:
    """Runs one until it has paged, and tells what was seen."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if "INFINISWAP" not in key or key == CODE_OWNER
    }
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
    path.write_text(f"{right}choices = 3\nevict_slabs_max = 3\n")
    run("systemctl", "reload", "infiniswapd.service", DEVICE)
    path.write_text(f"{right}[polisy]\n")
    done = subprocess.run(["systemctl", "reload", DEVICE], check=False, timeout=900)
    assert done.returncode != 0
    path.write_text(right)
    run("systemctl", "is-active", "infiniswapd.service", DEVICE)


def faults(directory: Path, node: Path) -> None:
    """What happens to services while the job swaps; each time it pages on."""
    paths = paths_of(NAME, Path("/run/infiniswap"), directory)
    log = directory / f"{DEVICE}.log"
    job_pid = systemd_value("isw-job.service", "MainPID")
    donor_pid = systemd_value("infiniswapd.service", "MainPID")
    before = device_unit()

    def status() -> Any:
        return client.status(paths, wait_s=WAIT_S)

    def standby() -> None:  # which takes minutes beside the job
        with stopped(job_pid):
            until(lambda: status().succession.standby == "ready", "a standby")

    def pages_in(what: str) -> None:
        seen = status().stats["pages_in"]
        until(lambda: status().stats["pages_in"] > seen + PAGES_BETWEEN, f"page-ins {what}")
        assert swap.find_area(node) is not None, what
        assert device_unit() == before, what

    standby()
    pages_in("before anything")
    print("+ kill -9 of the device's process", flush=True)
    os.kill(status().pid, signal.SIGKILL)
    until(lambda: status().succession.take_overs == 1, "the take-over")
    pages_in("after the take-over")

    until(lambda: status().slabs.get("mapped"), "a slab that is lent")
    back = log.read_text().count(BACK)
    run("systemctl", "restart", "infiniswapd.service")
    until(lambda: log.read_text().count(BACK) > back, "the device to have its lease back")
    assert systemd_value("infiniswapd.service", "MainPID") != donor_pid
    remote = status().stats["pages_in_remote"]
    until(lambda: status().stats["pages_in_remote"] > remote, "pages of the restarted donor")
    pages_in("after the daemon's restart")

    standby()
    with stopped(job_pid):
        run(sys.executable, "-m", "infiniswap", "device", "restart", NAME)
    succession = status().succession
    pages_in("after the device's restart")
    # What is wrong stays wrong: a round that begins now finds it.
    job_log = directory / "job"
    rounds = job_log.read_text().count("round")
    until(lambda: job_log.read_text().count("round") > rounds + 1, "a whole round of the job")
    seen = {
        "device_before": before,
        "device_after": device_unit(),
        "take_overs": succession.take_overs,
        "reason": succession.reason,
        "job": job_log.read_text(),
        "requests_failed": status().stats["requests_failed"],
    }
    run("systemctl", "is-active", "infiniswapd.service", DEVICE, "isw-job.service")
    print(f"SEEN faults {json.dumps(seen)}", flush=True)


def systemd_value(unit: str, name: str) -> int:
    show = ["systemctl", "show", "--value", f"--property={name}", unit]
    return int(subprocess.run(show, check=True, capture_output=True, text=True).stdout)


def main(frontend: str, directory: Path, pagecheck: Path) -> None:
    settings(frontend, directory)
    run(sys.executable, "-m", "infiniswap", "service", "install")
    run("systemctl", "enable", "infiniswapd.service", DEVICE)
    run("systemctl", "start", "multi-user.target")  # as at boot: nobody names them
    run("systemctl", "is-active", "infiniswapd.service", DEVICE)
    rights()
    command = run_argv(pagecheck, "--device", NAME)
    job("root", 0, directory, command)
    uid = make_user(MEMBER, GROUP)
    terminal = ["systemd-run", "--scope", "--property=Delegate=yes", f"--slice=user-{uid}.slice"]
    terminal += ["sh", "-c", TERMINAL, "sh", *as_user(MEMBER)]
    job("member", uid, directory, [*terminal, *command])
    swapping = ["systemd-run", "--unit=isw-job", "-p", "MemoryMax=16M"]
    swapping += ["-p", f"StandardOutput=append:{directory}/job"]
    run(*swapping, str(pagecheck), "48", "1", "100000")
    node = Path("/dev/infiniswap", NAME).resolve()
    end_s = time.monotonic() + 600
    while (area := swap.find_area(node)) is None or area.used_bytes < SWAPPED_BYTES:
        assert time.monotonic() < end_s, area
        time.sleep(0.1)
    faults(directory, node)
    reload()
    run("systemctl", "--no-pager", "--plain", "list-units", "infini*", "isw*", "*.swap")
    print(f"SERVES {node} {area.used_bytes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
