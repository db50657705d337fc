# SPDX-License-Identifier: Apache-2.0
"""sysbench's oltp_read_write on a PostgreSQL server of its own, whose data lie in its buffers.

    python transactions.py make DIRECTORY BIN ROWS MIB
    python transactions.py run SOURCE BIN ROWS MIB SECONDS

`make` fills four tables of ROWS rows; `run` works on a copy below TMPDIR. BIN has PostgreSQL's
programs, MIB is what its buffers take. The server runs as `nobody` on a socket in its directory
and writes to the disk as lazily as it can, since memory is what is measured.

Prints transactions per second with percentiles, and how many rows there are at the end.
"""

import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TABLES = 4
THREADS = 16
START_S = 60.0
NOBODY = pwd.getpwnam("nobody")
SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{socket}'
shared_buffers = {buffers}MB
huge_pages = off
dynamic_shared_memory_type = mmap
jit = off
fsync = off
full_page_writes = off
synchronous_commit = off
autovacuum = off
checkpoint_timeout = 1h
max_wal_size = 16GB
wal_level = minimal
max_wal_senders = 0
"""


def as_nobody(argv: Sequence[str]) -> list[str]:
    """PostgreSQL refuses to run as root. In an IPC namespace of its own, as a server that is killed
    leaves a shared segment behind."""
    ids = [f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups"]
    return ["unshare", "--ipc", "setpriv", *ids, "--pdeathsig", "KILL", "--", *argv]


def checked(argv: Sequence[str], directory: Path) -> str:
    """Runs a program; what it printed. Ends this one when it fails."""
    done = subprocess.run(
        argv,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed: {done.stdout[-500:]}")
    return done.stdout


@contextlib.contextmanager
def server(directory: Path, programs: Path, mebibytes: int) -> Iterator[None]:
    """PostgreSQL on DIRECTORY/data."""
    settings = SETTINGS.format(socket=directory, buffers=mebibytes)
    (directory / "data" / "postgresql.auto.conf").write_text(settings)
    child = subprocess.Popen(
        as_nobody([str(programs / "postgres"), "-D", str(directory / "data")]),
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=(directory / "log").open("w"),
    )
    try:
        ready = [str(programs / "pg_isready"), "--quiet", "--host", str(directory)]
        end_s = time.monotonic() + START_S
        while subprocess.run(ready, check=False).returncode:
            if child.poll() is not None or time.monotonic() > end_s:
                sys.exit(f"postgres does not serve: {(directory / 'log').read_text()[-500:]}")
            time.sleep(0.05)
        yield
    finally:
        child.send_signal(2)  # "fast": it ends its connections
        child.wait()


def sql(directory: Path, programs: Path, text: str, database: str = "sbtest") -> str:
    """What a statement gives, unaligned."""
    argv = [str(programs / "psql"), "-h", str(directory), "-U", "bench", "-d", database]
    return checked([*argv, "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-qtAc", text], directory)


def sysbench(directory: Path, rows: int, *options: str) -> str:
    """Runs it on the server."""
    argv = ["sysbench", "oltp_read_write", "--db-driver=pgsql", f"--pgsql-host={directory}"]
    argv += ["--pgsql-user=bench", "--pgsql-db=sbtest", f"--tables={TABLES}", "--rand-seed=1"]
    return checked([*argv, f"--table-size={rows}", *options], directory)


def hand_over(directory: Path) -> None:
    """To the server's user."""
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)


def make(target: Path, programs: Path, rows: int, mebibytes: int) -> None:
    """Fills the tables, in a directory that `nobody` can reach."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        hand_over(directory)
        initdb = [str(programs / "initdb"), "-D", str(directory / "data"), "-U", "bench"]
        checked(as_nobody([*initdb, "--auth=trust", "--no-sync", "--locale=C"]), directory)
        with server(directory, programs, mebibytes):
            sql(directory, programs, "create database sbtest", "postgres")
            sysbench(directory, rows, f"--threads={TABLES}", "prepare")
            sql(directory, programs, "create extension pg_prewarm")
            sql(directory, programs, "vacuum analyze")
        shutil.copytree(directory / "data", target / "data")


def histogram(text: str) -> list[tuple[float, int]]:
    """Milliseconds, and how many transactions took that."""
    found = re.findall(r"^\s*([\d.]+) \|.*?(\d+)$", text, re.MULTILINE)
    return [(float(value), int(count)) for value, count in found]


def quantile_us(counts: Sequence[tuple[float, int]], quantile: float) -> float:
    """Of a histogram, in microseconds."""
    wanted, seen = quantile * sum(count for _, count in counts), 0
    for value, count in counts:
        seen += count
        if seen > wanted:
            return value * 1000
    return 0.0


def run(source: Path, programs: Path, rows: int, mebibytes: int, seconds: int) -> dict[str, object]:
    """Reads all into the buffers, runs transactions, counts the rows."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        shutil.copytree(source / "data", directory / "data")
        hand_over(directory)
        (directory / "data").chmod(0o700)
        with server(directory, programs, mebibytes):
            for table in range(1, TABLES + 1):
                for relation in (f"sbtest{table}", f"sbtest{table}_pkey", f"k_{table}"):
                    sql(directory, programs, f"select pg_prewarm('{relation}')")
            options = [f"--threads={THREADS}", f"--time={seconds}", "--histogram", "run"]
            told = sysbench(directory, rows, *options)
            counts = [
                int(sql(directory, programs, f"select count(*) from sbtest{table}"))
                for table in range(1, TABLES + 1)
            ]
    per_s = re.search(r"transactions:\s+\d+\s+\(([\d.]+) per sec", told)
    if per_s is None:
        sys.exit(f"sysbench said: {told[-500:]}")
    taken = histogram(told)
    return {
        "check": {"rows": counts},
        "ops_per_s": float(per_s[1]),
        "p50_us": quantile_us(taken, 0.5),
        "p99_us": quantile_us(taken, 0.99),
        "p999_us": quantile_us(taken, 0.999),
    }


if __name__ == "__main__":
    what, place, binaries = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    numbers = [int(text) for text in sys.argv[4:]]
    if what == "make":
        make(place, binaries, *numbers)
    else:
        print(json.dumps(run(place, binaries, *numbers)))
