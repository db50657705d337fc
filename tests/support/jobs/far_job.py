# SPDX-License-Identifier: Apache-2.0
"""A job for `infiniswap run --paging far` that knows what must be in its memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from infiniswap.units import MIB
from support.devices.cluster import WAIT_S
from support.jobs.runs import Runner, ready

JOB_MIB = 192
FAR = ("--paging", "far", "--size", "256M")
FOREVER = 1 << 30

FILL = """
import sys
pieces, rounds = int(sys.argv[1]) // 16, int(sys.argv[2])
memory = [bytearray(16 << 20) for _ in range(pieces)]

def word(piece, at, number):
    return (piece << 32 | at).to_bytes(8, "little") + number.to_bytes(8, "little")

for number in range(rounds):
    for index, piece in enumerate(memory):
        for at in range(0, len(piece), 4096):
            piece[at : at + 16] = word(index, at, number)
    for index, piece in enumerate(memory):
        for at in range(0, len(piece), 4096):
            assert piece[at : at + 16] == word(index, at, number), (index, at, number)
    print("round", number, flush=True)
"""
"""A job: MIB ROUNDS. Writes every page of its memory and verifies it, round by round."""


READ = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # whose pages are charged to the job, then
pieces, rounds = int(sys.argv[2]) // 16, int(sys.argv[3])
memory = [bytearray(16 << 20) for _ in range(pieces)]
share = os.fstat(file).st_size // pieces
for number in range(rounds):
    for index, piece in enumerate(memory):
        for at in range(0, len(piece), 4096):
            piece[at : at + 8] = (number << 32 | index).to_bytes(8, "little")
        for at in range(index * share, (index + 1) * share, 1 << 20):
            os.pread(file, 1 << 20, at)
            os.pread(file, 1 << 20, at)  # once more: the kernel would rather keep it
    for index, piece in enumerate(memory):
        for at in range(0, len(piece), 4096):
            assert piece[at : at + 8] == (number << 32 | index).to_bytes(8, "little"), at
    print("round", number, flush=True)
"""
"""A job: FILE MIB ROUNDS. Beside its memory it reads a file that is not in memory, in parts."""


AT_RANDOM = """
import random, sys
pages, touches = int(sys.argv[1]) * 256, int(sys.argv[2])
memory, wanted = bytearray(pages * 4096), [0] * pages
for page in range(pages):
    memory[page * 4096] = 1
    wanted[page] = 1
source = random.Random(1)
for number in range(touches):
    page = source.randrange(pages)
    assert memory[page * 4096] == wanted[page], (number, page)
    if number % 4 == 0:
        wanted[page] = memory[page * 4096] = number % 251
assert [memory[page * 4096] for page in range(pages)] == wanted
print("all there")
"""
"""A job: MIB TOUCHES. Reads single pages all over its memory, and writes every fourth of them."""


def at_random(touches: int, mib: int = JOB_MIB) -> list[str]:
    """Command line of the job that touches pages at random."""
    return [sys.executable, "-c", AT_RANDOM, str(mib), str(touches)]


def read(file: Path, rounds: int, mib: int) -> list[str]:
    """Command line of the job that reads a file."""
    return [sys.executable, "-c", READ, str(file), str(mib), str(rounds)]


def fill(rounds: int = 1, mib: int = JOB_MIB, python: str = sys.executable) -> list[str]:
    """Command line of that job."""
    return [python, "-c", FILL, str(mib), str(rounds)]


def check_rounds(process: subprocess.Popen[bytes], *numbers: int) -> None:
    """Each of these rounds verifies every page."""
    for number in numbers:
        ready(process, b"round %d\n" % number)


def went_far(runner: Runner) -> bool:
    """Whether a good part of the job is away now."""
    return bool(runner.status["far"]["used_bytes"] > 32 * MIB)


def stop(process: subprocess.Popen[bytes]) -> str:
    """Ends a job that never ends; what `run` has said."""
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM, stderr.decode()
    return stderr.decode()
