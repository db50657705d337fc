# SPDX-License-Identifier: Apache-2.0
"""A job of `infiniswap run` behind zswap, which goes on only when it is told to."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from infiniswap.system.files import SYS, parse_key_values, read_text, write_text
from support.devices.cluster import WAIT_S
from support.jobs.runs import Runner, ready

PARAMETERS: Final = SYS / "module/zswap/parameters"
COMPRESSES = 50
"""Percent of each page that are random bytes; the rest are zeros."""

_JOB = """
import mmap, os, sys
size, filled = int(sys.argv[1]) << 20, 4096 * int(sys.argv[2]) // 100
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
noise = os.urandom(1 << 20)

def page(at, number):
    start = (at // 4096 * 97 + number * 13) % (len(noise) - 4096)
    return (at + number).to_bytes(8, "little") + noise[start : start + filled - 8]

print("ready", flush=True)
for number, _ in enumerate(sys.stdin):
    for at in range(0, size, 4096):
        memory[at : at + filled] = page(at, number)
    for at in range(0, size, 4096):
        assert memory[at : at + filled] == page(at, number), at
    print("round", number, flush=True)
"""


@contextlib.contextmanager
def set_zswap(**values: str) -> Iterator[None]:
    """zswap with these settings; at the end they are as they were."""
    before = {name: read_text(PARAMETERS / name, "cannot read zswap").strip() for name in values}
    try:
        for name, value in values.items():
            write_text(PARAMETERS / name, value, "cannot set zswap")
        yield
    finally:
        for name, value in before.items():
            write_text(PARAMETERS / name, value, "cannot put back zswap")


class Job:
    """One run.

    Args:
        runner: its runs.
        summary: a path for the summary.
        local_mib: of memory.
        job_mib: what it fills.
        options: of `infiniswap run`.
    """

    def __init__(
        self, runner: Runner, summary: Path, local_mib: int, job_mib: int, options: tuple[str, ...]
    ) -> None:
        self._runner = runner
        self._summary = summary
        self._local = f"{local_mib}M"
        self._job_mib = job_mib
        self._options = (*options, "--summary-json", str(summary))
        self._rounds = 0
        self._cgroup = Path()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, filled_percent: int) -> Path:
        """Its cgroup; the job has filled nothing yet."""
        argv = (sys.executable, "-c", _JOB, str(self._job_mib), str(filled_percent))
        pipe = subprocess.PIPE
        process = self._runner.popen(*argv, options=self._options, local=self._local, stdin=pipe)
        ready(process)
        self._process, self._cgroup = process, self._runner.cgroup(process).path
        return self._cgroup

    def rounds(self, count: int) -> None:
        """Lets it write and verify all of its memory so often."""
        for _ in range(count):
            self._tell()
            assert self._process is not None
            ready(self._process, f"round {self._rounds}\n".encode())
            self._rounds += 1

    def _tell(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def counters(self) -> dict[str, int]:
        """Of its cgroup's memory.stat."""
        return parse_key_values(read_text(self._cgroup / "memory.stat", "cannot read counters"))

    def page_outs(self) -> int:
        """Pages that the device has got."""
        pages: int = self._runner.status["stats"]["pages_out"]
        return pages

    def end(self) -> tuple[Any, str]:
        """Ends it in order; the summary, and what `run` has said."""
        code, said = self._communicate()
        assert code == 0, said
        return json.loads(self._summary.read_text()), said

    def _communicate(self) -> tuple[int, str]:
        assert self._process is not None
        _, stderr = self._process.communicate(timeout=2 * WAIT_S)
        said = stderr.decode()
        assert "Traceback" not in said, said
        return self._process.returncode, said
