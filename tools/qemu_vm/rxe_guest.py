# SPDX-License-Identifier: Apache-2.0
"""What runs in each machine of `tools/vm --rxe`: `... -m qemu_vm.rxe_guest {demo | -- COMMAND...}`.

The machines become a cluster by the scripts that Vagrant's machines are provisioned with
(vagrant/provision): soft-RoCE on the virtual network, a daemon on all but the last machine, a
device on the last one. Then `demo` runs a job there that swaps over RDMA, or every machine runs
COMMAND.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infiniswap.demo.progress import Progress
from infiniswap.device.api import DeviceStatus
from infiniswap.device.control import client
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import (
    CheckFailedError,
    DeadlineError,
    InfiniswapError,
    SystemCallError,
    UsageError,
)
from infiniswap.units import MIB, PAGE_BYTES
from qemu_vm import rxe_results
from qemu_vm.rxe_results import Cpu, Donor, Results

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "vagrant" / "provision"
SHARED = Path("/run/vm/host/share")
"""Seen by all machines of a run, and gone with it."""
DEVICE = "swap0"
ROLE = "INFINISWAP_VM_ROLE"
PAGECHECK = "INFINISWAP_VM_PAGECHECK"
"""Names the program that the demo runs (tests/system/pagecheck.c), built outside."""
PATHS = DevicePaths(DEVICE, Path("/run/infiniswap") / DEVICE, Path("/var/tmp/infiniswap"))
_SIZES = {"SLAB": "8M", "POOL": "192M", "HEADROOM": "64M", "SIZE": "128M"}
"""Small, so that what is swapped out spreads over all donors."""
_ASK_S = 300.0
_STOP_S = 300.0
_BARRIER_S = 1200
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Host:
    """This machine among the others.

    Attributes:
        name: h1, h2, ...
        names: of all machines: donors, and the consumer last.
        env: for what is run here.
    """

    name: str
    names: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def is_consumer(self) -> bool:
        """It is the last one."""
        return self.name == self.names[-1]

    @property
    def role(self) -> str:
        """ "donor" or "consumer"."""
        return "consumer" if self.is_consumer else "donor"

    def meet(self, word: str) -> None:
        """Waits until all machines have come so far.

        Raises:
            SystemCallError: one of them has ended, or took too long.
        """
        if self._run(["vm-barrier", f"rxe-{word}", str(_BARRIER_S)]):
            raise SystemCallError(
                f"{self.name} waited in vain for the other machines ({word})",
                mend="What they said stands above.",
            )

    def script(self, name: str, *args: str, **env: str) -> None:
        """Runs a provisioning script.

        Raises:
            SystemCallError: it failed, and has said why.
        """
        if status := self._run(["sh", str(SCRIPTS / name), *args], **env):
            raise SystemCallError(
                f"{name} ended with exit code {status} on {self.name}",
                mend="What it said stands above.",
            )

    def ours(self, *args: str) -> int:
        """Runs `infiniswap ARGS`."""
        return self._run(["infiniswap", *args])

    def _run(self, argv: Sequence[str], **env: str) -> int:
        sys.stdout.flush()
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False, env={**self.env, **env})
        return done.returncode


def this_host(environ: Mapping[str, str]) -> Host:
    """From what tools/vm tells its commands.

    Raises:
        UsageError: this is no machine of tools/vm, or the only one.
    """
    names = tuple(environ.get("INFINISWAP_VM_HOSTS", "").split())
    name = environ.get("INFINISWAP_VM_HOST", "")
    if len(names) < 2 or name not in names:
        raise UsageError("this runs in the machines of tools/vm --hosts N --rxe")
    role = "consumer" if name == names[-1] else "donor"
    path = f"{Path(sys.executable).parent}:{environ.get('PATH', '')}"
    return Host(name, names, {**environ, "PATH": path, ROLE: role})


# ------------------------------------------------------------------------- provisioning


def provision(host: Host, progress: Progress, **settings: str) -> None:
    """Makes it a donor, or the consumer.

    Args:
        host: this one.
        progress: told of every step.
        settings: more variables for the scripts.

    Raises:
        SystemCallError: a step failed here or on another machine.
    """
    env = {**_SIZES, "BACKUP_DIR": str(PATHS.backup.parent), **settings}
    address = socket.gethostbyname(host.name)
    progress.say(f"{host.role} {address}: installed, soft-RoCE, then the {_what(host)}")
    secret = SHARED / "secret"
    if host.name == host.names[0]:
        new = secret.with_suffix(".new")
        new.write_bytes(base64.b64encode(secrets.token_bytes(32)))
        new.rename(secret)
    host.script("install.sh", str(ROOT))
    # One packet per page: the virtual network takes them.
    subprocess.run(["ip", "link", "set", "eth0", "mtu", "4200"], check=True, env=host.env)
    host.script("rxe.sh", address)
    host.meet("network")
    if not host.is_consumer:
        host.script("donor.sh", address, str(secret), **env)
    host.meet("donors")
    if host.is_consumer:
        donors = [socket.gethostbyname(name) for name in host.names[:-1]]
        host.script("consumer.sh", str(secret), *donors, **env)
    host.meet("device")


def _what(host: Host) -> str:
    return "device" if host.is_consumer else "daemon"


def withdraw(host: Host) -> None:
    """Ends what provision() has started: the device first.

    Raises:
        SystemCallError: it does not end as it should.
        DeadlineError: likewise.
    """
    if host.is_consumer and host.ours("device", "remove", DEVICE):
        raise SystemCallError(f"the device {DEVICE} cannot be removed", mend="See above.")
    host.meet("removed")
    if not host.is_consumer:
        pid = daemon_pid()
        os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + _STOP_S
        while Path("/proc", str(pid)).exists():
            if time.monotonic() > end_s:
                raise DeadlineError(f"the daemon (process {pid}) does not end")
            time.sleep(0.1)


def daemon_pid() -> int:
    """Of the donor's daemon, as donor.sh started it."""
    return int(Path("/run/infiniswapd.pid").read_text())


# -------------------------------------------------------------------------------- demo


@dataclass(frozen=True, slots=True)
class Job:
    """A program that knows every byte of its memory, and how much of that it is given.

    Attributes:
        program: tests/system/pagecheck.c, built.
        mib, local_mib: its memory, and how much of it is this host's.
        rounds: how often it verifies all of it.
    """

    program: Path
    mib: int = 40
    local_mib: int = 24
    rounds: int = 1
    idle_s: float = 10.0
    """How long everything is left alone afterwards, to compare with."""


def cpu(pid: int) -> Cpu:
    """Processor time used so far by a daemon and by its host's kernel."""
    pages_ns = control_ns = 0
    for task in Path("/proc", str(pid), "task").iterdir():
        used_ns = int((task / "schedstat").read_text().split()[0])
        if (task / "comm").read_text().startswith("isw"):
            pages_ns += used_ns
        else:
            control_ns += used_ns
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    # user nice system idle iowait irq softirq (proc_stat(5))
    return Cpu(
        at_s=time.monotonic(),
        pages_s=pages_ns / 1e9,
        control_s=control_ns / 1e9,
        softirq_s=ticks[6] / _TICKS_PER_S,
        system_s=ticks[2] / _TICKS_PER_S,
    )


def demo(host: Host, progress: Progress, job: Job) -> Results | None:
    """Runs the job on the consumer; the results are None on a donor, which says what it spent.

    Raises:
        InfiniswapError: a step failed here or on another machine.
    """
    if not host.is_consumer:
        host.meet("job-begins")
        before = cpu(daemon_pid())
        host.meet("job-ended")
        ended = cpu(daemon_pid())
        time.sleep(job.idle_s)
        told = {"job": ended.since(before), "idle": cpu(daemon_pid()).since(ended)}
        text = json.dumps({name: asdict(used) for name, used in told.items()})
        (SHARED / f"{host.name}.json").write_text(text)
        host.meet("told")
        return None
    begun = _status()
    host.meet("job-begins")
    wrong, summary = _run_job(host, progress, job)
    status = _status()
    host.meet("job-ended")
    host.meet("told")
    return Results(
        pages=job.mib * MIB // PAGE_BYTES,
        wrong=wrong,
        frontend=status.frontend,
        summary=summary,
        donors=tuple(_donor(name, begun, status) for name in host.names[:-1]),
    )


def _status() -> DeviceStatus:
    return client.status(PATHS, wait_s=_ASK_S)


def _donor(name: str, begun: DeviceStatus, status: DeviceStatus) -> Donor:
    address = f"{socket.gethostbyname(name)}:9400"
    before = next(row for row in begun.donors if row.address == address)
    told = json.loads((SHARED / f"{name}.json").read_text())
    row = next(row for row in status.donors if row.address == address)
    return Donor(
        address=address,
        transport=row.transport,
        reason=row.transport_reason,
        slabs=row.slabs,
        read_pages=row.read_pages - before.read_pages,
        write_pages=row.write_pages - before.write_pages,
        cpu=Cpu(**told["job"]),
        idle=Cpu(**told["idle"]),
    )


def _run_job(host: Host, progress: Progress, job: Job) -> tuple[int, dict[str, object]]:
    """Returns how many pages were wrong, and the summary of `run`.

    Raises:
        SystemCallError: there is no summary, so it came to nothing.
    """
    told = Path("/run/infiniswap-demo.json")
    seed = secrets.randbelow(1 << 31)
    options = ["run", "--local", f"{job.local_mib}M", "--device", DEVICE]
    program = [job.program.name, str(job.mib), str(seed), str(job.rounds)]
    progress.say(f"infiniswap {' '.join(options)} -- {' '.join(program)}")
    said = []
    with subprocess.Popen(
        ["infiniswap", *options, "--summary-json", str(told), "--", *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**host.env, "PATH": f"{job.program.parent}:{host.env['PATH']}"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            progress.say(f"  {line.rstrip()}")
    wrong = re.search(r"^(\d+) pages are wrong$", "".join(said), re.MULTILINE)
    try:
        summary: dict[str, object] = json.loads(told.read_text())
    except (OSError, ValueError) as error:
        raise SystemCallError(
            f"`infiniswap run` ended with exit code {process.returncode} and left no summary",
            mend="What it said stands above.",
        ) from error
    return int(wrong[1]) if wrong else 0, summary


# -------------------------------------------------------------------------------- main


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    progress = Progress()
    try:
        host = this_host(os.environ)
        provision(host, progress)
        if argv[:1] == ["--"]:
            sys.stdout.flush()
            os.execvpe(argv[1], list(argv[1:]), dict(host.env))
        job = Job(Path(os.environ[PAGECHECK]))
        results = demo(host, progress, job)
        if results is not None:
            _tell(results, progress)
    except InfiniswapError as error:
        print(f"infiniswap: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _tell(results: Results, progress: Progress) -> None:
    """Raises CheckFailedError when it is not as it has to be."""
    print("\n".join(["", *rxe_results.lines(results), ""]), flush=True)
    if found := rxe_results.problems(results):
        raise CheckFailedError("; ".join(found), where="demo")
    progress.say(
        f"done: a job swapped over RDMA to the memory of {len(results.donors)} other host"
        f"{'s' if len(results.donors) > 1 else ''}, and no page was wrong"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
