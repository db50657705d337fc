# SPDX-License-Identifier: Apache-2.0
"""A systemd of one's own: the first process of new pid, mount and cgroup name spaces.

It runs next to nothing: a D-Bus daemon and one command, with whose exit code it ends. That is
enough of a host for units, slices, scopes and a shutdown in order.

    python systemd_boot.py [--poweroff] COMMAND...

With --poweroff a command that succeeds is followed by an orderly shutdown; else the end is at once.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CHECKOUT = Path(__file__).parents[3]
CONTROLLERS = "+memory +pids +cpu +io"

SOCKET = """[Unit]
DefaultDependencies=no
[Socket]
ListenStream=/run/dbus/system_bus_socket
"""
DAEMON = """[Unit]
DefaultDependencies=no
Requires=dbus.socket
[Service]
Type=notify
NotifyAccess=main
OOMScoreAdjust=-900
ExecStart=/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation
"""
COMMAND = """[Unit]
DefaultDependencies=no
Wants=dbus.service
After=dbus.service
SuccessAction={success}
FailureAction=exit-force
[Service]
Type=oneshot
WorkingDirectory={directory}
EnvironmentFile={environment}
ExecStart={command}
StandardOutput=append:{output}
StandardError=append:{output}
TimeoutStartSec=infinity
"""
INSIDE = """set -e
until [ -e %(alone)s ]; do sleep 0.1; done
mount --make-rprivate /
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
[ ! -d /run/vm ] || { mkdir -p %(keep)s; mount --rbind /run/vm %(keep)s; }
mount -t tmpfs -o mode=755 none /run
[ ! -d %(keep)s ] || { mkdir -p /run/vm; mount --rbind %(keep)s /run/vm; }
# Nor is what is installed there anybody else's afterwards.
mkdir -p /run/systemd/system /run/dbus /run/etc/new /run/etc/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/new,workdir=/run/etc/work none /etc
# What a host starts besides costs minutes here: devices, temporary files, clocks.
for wants in sysinit sockets timers multi-user; do
    for unit in /lib/systemd/system/$wants.target.wants/* /etc/systemd/system/$wants.target.wants/*
    do
        case $unit in
            *journald*|*dbus*|*"*"*) ;;
            *) ln -sf /dev/null /run/systemd/system/${unit##*/} ;;
        esac
    done
done
cp -r %(units)s/* /run/systemd/system/
export container=infiniswap-test
exec /lib/systemd/systemd --system --unit=isw-test.service --log-target=console \
    --log-level=notice --show-status=no --default-standard-output=null
"""


def run(argv: list[str], success: str = "exit-force") -> int:
    """Runs a command under a systemd; returns its exit code. What it writes goes to ours."""
    with tempfile.TemporaryDirectory(prefix="isw-systemd-", dir="/tmp") as name:
        root, units = Path(name), Path(name) / "units"
        units.mkdir()
        output, status, environment = root / "output", root / "status", root / "environment"
        environment.write_text(
            "".join(f"{key}={shlex.quote(value)}\n" for key, value in os.environ.items())
        )
        script = root / "command"
        command = f"{shlex.join(argv)}\ncode=$?\necho $code > {status}\nexit $code\n"
        script.write_text(f"#!/bin/sh\n{command}")
        script.chmod(0o755)
        (units / "dbus.socket").write_text(SOCKET)
        (units / "dbus.service").write_text(DAEMON)
        (units / "isw-test.service").write_text(
            COMMAND.format(
                directory=os.getcwd(),
                environment=environment,
                command=script,
                output=output,
                success=success,
            )
        )
        own = CGROUP / root.name
        own.mkdir()
        _let_the_daemon_in(units)
        try:
            (CGROUP / "cgroup.subtree_control").write_text(CONTROLLERS)
            alone = root / "alone"
            inside = INSIDE % {"units": units, "keep": root / "vm", "alone": alone}
            enter = 'echo $$ > "$0/cgroup.procs"; exec unshare -mpfC --mount-proc sh -c "$1"'
            output.touch()
            outside = subprocess.Popen(["sh", "-c", enter, str(own), inside])
            # It ends by itself, when everything has been written that was before that end.
            tail = ["tail", "-qf", "-n", "+1", f"--pid={outside.pid}", str(output)]
            with subprocess.Popen(tail):
                try:
                    _wait(outside, alone)
                finally:
                    # Whoever is left when this is interrupted.
                    (own / "cgroup.kill").write_text("1")
                    while "populated 1" in (own / "cgroup.events").read_text():
                        time.sleep(0.1)
                    outside.kill()
                    outside.wait()
            return int(status.read_text()) if status.exists() else 99
        finally:
            for directory, _, _ in sorted(os.walk(own), reverse=True):
                os.rmdir(directory)


def _let_the_daemon_in(units: Path) -> None:
    """Its user reads the checkout and its interpreter, which may be below root's home as they are
    on the host (a guest's files are its own), or in /tmp, of which the daemon has one of its own.
    Root knows whose the checkout is."""
    for directory in (*Path(os.path.realpath(sys.executable)).parents, *CHECKOUT.parents):
        directory.chmod(directory.stat().st_mode | 0o011)
    owner = f"Environment=INFINISWAP_CODE_OWNER={CHECKOUT.stat().st_uid}\n"
    bind = f"BindReadOnlyPaths={CHECKOUT}\n" if CHECKOUT.is_relative_to("/tmp") else ""
    for unit, lines in (("infiniswapd", owner + bind), ("infiniswap-device@", owner)):
        drop_in = units / f"{unit}.service.d"
        drop_in.mkdir()
        (drop_in / "checkout.conf").write_text(f"[Service]\n{lines}")


def _wait(outside: subprocess.Popen[bytes], alone: Path) -> None:
    """Until the first process of the name space has ended."""
    children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
    while outside.poll() is None and not children.read_text().strip():
        time.sleep(0.1)
    # A cgroup with processes in it can have no children with controllers, so the one that waits
    # for the first process of the name space has to leave.
    (CGROUP / "cgroup.procs").write_text(str(outside.pid))
    alone.touch()
    outside.wait(3600)  # whoever has started this has bounds of its own


if __name__ == "__main__":
    if sys.argv[1] == "--poweroff":
        sys.exit(run(sys.argv[2:], success="poweroff"))
    sys.exit(run(sys.argv[1:]))
