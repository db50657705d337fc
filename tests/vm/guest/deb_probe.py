# SPDX-License-Identifier: Apache-2.0
"""Under a systemd: the Debian package is installed, upgraded while a job pages, and purged.

python deb_probe.py FRONTEND DIRECTORY PAGECHECK PACKAGE_BEFORE PACKAGE
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vm.guest import services_probe as host

from infiniswap import code_versions
from infiniswap.device.control import client
from infiniswap.device.spec.rundir import paths_of
from infiniswap.system import swap

TOP = Path("/usr/lib/infiniswap")
DAEMON = "infiniswapd.service"
COMMAND = "/usr/bin/infiniswap"
PLACES = (
    *("/usr/bin", "/usr/lib", "/usr/lib/systemd/system", "/usr/lib/sysusers.d"),
    *("/usr/lib/udev/rules.d", "/usr/share", "/usr/share/doc", "/usr/share/man/man1"),
    *("/etc", "/etc/systemd/system", "/etc/systemd/system/multi-user.target.wants"),
    *("/var/lib", "/run"),
)
SETTINGS = """[cluster]
secret_file = "/etc/infiniswap/secret"
[daemon]
listen = "127.0.0.1:{port}"
pool = "128M"
slab = "8M"
headroom = "16M"
lease_grace_s = {patience}
[device]
slab = "8M"
backup_dir = "{directory}"
[policy]
suspend_s = {patience}
"""


def dpkg(*argv: str) -> str:
    """Runs it; what it says, with its exit code in front."""
    print("+ dpkg", *argv, flush=True)
    done = subprocess.run(
        # Not those of other packages, such as the manual's index: they take minutes here.
        ["dpkg", "--no-triggers", *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = " ".join((done.stdout + done.stderr).split())
    print(said, flush=True)
    return f"{done.returncode} {said}"


def install(package: str) -> None:
    said = dpkg("--force-confold", "-i", package)
    assert said.startswith("0 "), said


def prepare(frontend: str, directory: Path) -> None:
    """Settings, services, and logs that the test can read."""
    host.run(COMMAND, "init", "--secret", "/etc/infiniswap/secret")
    (host.CONFIG / "infiniswap.toml").write_text(
        SETTINGS.format(port=host.PORT, directory=directory, patience=host.PATIENCE)
    )
    options = f"--size 64M --frontend {frontend} --swap --donors 127.0.0.1:{host.PORT}"
    (host.CONFIG / "devices" / f"{host.NAME}.env").write_text(f"DEVICE_OPTIONS={options}\n")
    for unit in (DAEMON, host.DEVICE):
        drop_in = Path("/run/systemd/system") / f"{unit}.d"
        drop_in.mkdir(exist_ok=True)
        (drop_in / "log.conf").write_text(
            f"[Service]\nStandardError=append:{directory}/{unit}.log\n"
        )
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "enable", "--now", DAEMON, host.DEVICE)


def version_of(pid: int) -> str:
    """The directory that a process has its code from."""
    return Path("/proc", str(pid), "cmdline").read_text().split("/")[4]


def versions() -> list[str]:
    return sorted(path.name for path in TOP.iterdir() if path.name[0].isdigit())


class Upgrade:
    """One device and the job on it."""

    def __init__(self, directory: Path) -> None:
        self.paths = paths_of(host.NAME, Path("/run/infiniswap"), directory)
        self.log = directory / f"{host.DEVICE}.log"
        self.job_log = directory / "job"
        self.seen: dict[str, Any] = {"device_before": host.device_unit()}

    def status(self) -> Any:
        return client.status(self.paths, wait_s=host.WAIT_S)

    def pages_in(self, what: str) -> None:
        counted = self.status().stats["pages_in_remote"]
        host.until(
            lambda: self.status().stats["pages_in_remote"] > counted + host.PAGES_BETWEEN, what
        )

    def upgrade(self, package: str) -> None:
        host.until(lambda: self.status().slabs.get("mapped"), "a slab that is lent")
        (old,) = versions()
        pid, donor = self.status().pid, host.systemd_value(DAEMON, "MainPID")
        back = self.log.read_text().count(host.BACK)
        install(package)
        new = (TOP / "current").readlink().name
        daemon = host.systemd_value(DAEMON, "MainPID")
        host.until(lambda: self.log.read_text().count(host.BACK) > back, "the device's lease")
        self.pages_in("pages of the restarted donor")
        self.seen |= {
            "versions": [old, new],
            "kept": versions(),
            "same_process": pid == self.status().pid,
            "device_code": version_of(self.status().pid),
            "daemon_restarted": daemon != donor,
            "daemon_code": version_of(daemon),
        }

    def refuse(self) -> None:
        self.seen["refused"] = [dpkg(f"--{word}", "infiniswap") for word in ("remove", "purge")]
        self.pages_in("pages after the refusals")

    def restart(self) -> None:
        host.until(lambda: self.status().succession.standby == "ready", "a standby")
        host.run(COMMAND, "device", "restart", host.NAME)
        self.pages_in("pages after the device's restart")
        rounds = self.job_log.read_text().count("round")
        host.until(lambda: self.job_log.read_text().count("round") > rounds + 1, "a whole round")
        self.seen |= {
            "restarted_code": version_of(self.status().pid),
            "device_after": host.device_unit(),
            "requests_failed": self.status().stats["requests_failed"],
            "job": self.job_log.read_text(),
        }


def left_behind() -> list[str]:
    """Files, users and processes of the package."""
    found = [str(path) for place in PLACES for path in Path(place).glob("*infiniswap*")]
    users = Path("/etc/passwd").read_text() + Path("/etc/group").read_text()
    found += [line for line in users.splitlines() if line.startswith("infiniswap")]
    for process in Path("/proc").glob("[0-9]*"):
        words = (process / "cmdline").read_bytes()
        if b"/usr/lib/infiniswap" in words:
            found.append(f"process {process.name}: {words!r}")
    return found


def main(frontend: str, directory: Path, pagecheck: Path, before: str, now: str) -> None:
    Path("/usr/sbin/policy-rc.d").unlink(missing_ok=True)  # of a host that is itself a container
    install(before)
    prepare(frontend, directory)
    host.run("systemctl", "is-active", DAEMON, host.DEVICE)
    swapping = ["systemd-run", "--unit=isw-job", "-p", "MemoryMax=16M"]
    swapping += ["-p", f"StandardOutput=append:{directory}/job"]
    host.run(*swapping, str(pagecheck), "48", "1", "100000")
    node = Path("/dev/infiniswap", host.NAME).resolve()
    end_s = time.monotonic() + 600
    while (area := swap.find_area(node)) is None or area.used_bytes < host.SWAPPED_BYTES:
        assert time.monotonic() < end_s, area
        time.sleep(0.1)

    device = Upgrade(directory)
    device.upgrade(now)
    device.refuse()
    device.restart()
    device.seen["beside"] = versions()
    host.run("systemctl", "stop", "isw-job.service")
    for process in code_versions.processes(TOP):  # of the former daemon, for its lease_grace_s
        if "--release" in process.words:
            os.kill(process.pid, signal.SIGTERM)
    host.run("systemctl", "disable", "--now", host.DEVICE)
    device.seen["left"] = versions()
    purged = dpkg("--purge", "infiniswap")
    device.seen |= {"purged": purged, "left_behind": left_behind()}
    print(f"SEEN upgrade {json.dumps(device.seen)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
