# SPDX-License-Identifier: Apache-2.0
"""Makes a cluster of tools/netns-cluster with two jobs that page, and takes pictures of both views.

As root. Takes about two minutes; what it has made goes with it, also when it fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from netns_cluster import cluster as clusters
from netns_cluster.cluster import Cluster
from netns_cluster.plan import HostPlan, Plan

from infiniswap.errors import InfiniswapError, UnavailableError
from infiniswap.units import MIB
from pictures.browser import EXECUTABLE

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
BYTES_MAX: Final = 150_000
"""Of one picture."""
_HOSTS: Final = 4
_MEMORY: Final = 448 * MIB
_COLUMNS, _LINES = 100, 24
_WAIT_S: Final = 120.0
_JOBS: Final = {"h1": "prep.py", "h2": "train.py"}
"""What borrows, by host; the others lend alone."""
_JOB: Final = """
import random, time
data = bytearray(b"x") * (120 << 20)
while True:
    start = random.randrange(len(data) >> 20) << 20
    for offset in range(start, start + (1 << 20), 4096):
        data[offset] = data[offset] + 1 & 0xFF
    time.sleep(0.2)
"""
"""It uses all of its memory in turn, more than its limit: it pages for as long as it runs."""


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Four hosts, one of which is short of memory."""
    name = f"p{secrets.token_hex(3)}"
    plan = Plan(
        name,
        tuple(HostPlan(memory_bytes=_MEMORY) for _ in range(_HOSTS)),
        settings={"policy.hot_pages_per_s": "1.0", "policy.period_s": "0.5"},
    )
    made = clusters.up(plan)
    try:
        made.squeeze("h3", 200 * MIB)
        yield made
    finally:
        clusters.down(name)


def started(made: Cluster, host: str, argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A command on a host, which knows the host's name as its own."""
    named = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *argv]
    with log.open("wb") as file:
        return subprocess.Popen(
            made.command(host, named, cgroup=False),
            env=made.environment(host),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def asked(made: Cluster, host: str, argv: Sequence[str]) -> str:
    """What a command on a host prints."""
    done = subprocess.run(
        made.command(host, argv, cgroup=False),
        env={**made.environment(host), "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"},
        check=True,
        capture_output=True,
        encoding="utf-8",
        timeout=_WAIT_S,
    )
    return done.stdout


@contextlib.contextmanager
def jobs(made: Cluster, directory: Path) -> Iterator[None]:
    """Two jobs that page while the block lasts."""
    running = []
    try:
        for host, name in _JOBS.items():
            script = directory / name
            script.write_text(f"#!{sys.executable}\n{_JOB}")  # so that the job has its name
            script.chmod(0o700)
            # Swap areas are shared: one of them must be too small for both jobs.
            run = ["infiniswap", "run", "--local", "48M", "--size", "96M", "--"]
            running.append(started(made, host, [*run, str(script)], directory / f"{host}.log"))
        until(lambda: all(f" {name} " in table(made) for name in _JOBS.values()), directory)
        yield
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in running:
            process.wait(_WAIT_S)


def table(made: Cluster) -> str:
    """Who borrows."""
    return asked(made, "h4", ["infiniswap", "status"])


def until(condition: Callable[[], bool], directory: Path) -> None:
    """Waits until both jobs are seen."""
    end_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > end_s:
            logs = "".join(path.read_text() for path in sorted(directory.glob("*.log")))
            raise UnavailableError(f"the jobs have not paged within {_WAIT_S:g} s: {logs}")
        time.sleep(0.5)


def top(made: Cluster, directory: Path) -> Path:
    """The text of `infiniswap top`, with its colours."""
    socket, text = directory / "tmux", directory / "top.txt"
    tmux = ["tmux", "-S", str(socket), "-f", os.devnull]
    size = ["-x", str(_COLUMNS), "-y", str(_LINES)]
    asked(made, "h1", [*tmux, "new-session", "-d", *size, "infiniswap", "top"])
    try:

        def drawn() -> bool:
            shown = asked(made, "h1", [*tmux, "capture-pane", "-e", "-p"])
            text.write_text(shown, encoding="utf-8")
            return all(name in shown for name in _JOBS.values()) and "donors answer" in shown

        until(drawn, directory)
        time.sleep(10.0)  # rates and events
        drawn()
    finally:
        asked(made, "h1", [*tmux, "kill-server"])
    return text


def main() -> int:
    """Writes the pictures.

    Raises:
        InfiniswapError: something is missing here.
    """
    for program in ("tmux", EXECUTABLE, "unshare"):
        if shutil.which(program) is None:
            raise UnavailableError(f"{program} is missing", mend="Run `make setup` as root.")
    clusters.check_machine()
    made_now = {name: DOCS / f"{name}.png" for name in ("page", "page-dark", "top")}
    with tempfile.TemporaryDirectory() as temporary, cluster() as made:
        directory = Path(temporary)
        with jobs(made, directory):
            text = top(made, directory)
            link = asked(made, "h4", ["infiniswap", "ui", "h4"]).splitlines()[0]
            arguments = ["--link", link, "--text", str(text), "--columns", str(_COLUMNS)]
            arguments += ["--light", str(made_now["page"]), "--dark", str(made_now["page-dark"])]
            arguments += ["--top", str(made_now["top"])]
            asked(made, "h4", [sys.executable, "-m", "pictures.shoot", *arguments])
    for path in made_now.values():
        size = path.stat().st_size
        print(f"pictures: {path.relative_to(ROOT)}, {size // 1000} kB")
        if size > BYTES_MAX:
            print(f"pictures: that is more than {BYTES_MAX // 1000} kB", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InfiniswapError as error:
        sys.exit(f"pictures: {error}")
