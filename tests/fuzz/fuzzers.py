#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the fuzzers, one after the other (`make fuzz`).

    python tests/fuzz/fuzzers.py --seconds 1800 [--only NAME] [--directory build/fuzz]

Each gets its seeds (seeds.py) and what it found worth keeping before (DIRECTORY/corpus/NAME), and
writes DIRECTORY/NAME.log. A finding is kept as DIRECTORY/findings/NAME/..., with the command that
repeats it in the log, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
HERE: Final = Path(__file__).resolve().parent

SANITIZE: Final = "-fsanitize=fuzzer,address,undefined"
CFLAGS: Final = (
    "-g",
    "-O1",
    "-std=gnu11",
    "-D_GNU_SOURCE=1",
    "-Wall",
    "-Wextra",
    "-pthread",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
ENDING_S: Final = 120.0
"""How long a fuzzer may take to end by itself after its time."""


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """One of them.

    Attributes:
        name: fuzz_NAME.c, or fuzz_NAME.py without sources.
        sources: directories or patterns under csrc/.
        wraps: calls that the fuzzer answers in the kernel's place.
        bytes_max: longest input.
    """

    name: str
    sources: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    bytes_max: int = 4096


FUZZERS: Final = (
    Fuzzer(
        "nbd_server",
        ("wire/*.c", "store/*.c", "verbs/choose.c", "verbs/none.c", "util/*.c"),
        ("recvmsg", "sendmsg", "setsockopt", "shutdown", "poll", "pthread_cond_wait"),
        16_384,
    ),
    Fuzzer(
        "nbd_client",
        ("transport/tcp*.c", "transport/queue.c", "util/*.c"),
        ("recv", "send", "poll"),
    ),
    Fuzzer("nbd_reply", ("transport/tcp*.c", "transport/queue.c", "util/*.c"), (), 2048),
    Fuzzer("control", (), (), 2048),
)


def missing(fuzzer: Fuzzer) -> str:
    """What this fuzzer needs and this machine lacks; empty: nothing."""
    if not fuzzer.sources or _clang_fuzzes():
        return ""
    return "needs clang with libFuzzer (Debian: apt install clang)"


@functools.cache
def _clang_fuzzes() -> bool:
    if shutil.which("clang") is None:
        return False
    code = b"int LLVMFuzzerTestOneInput(const char *d, long n) { (void)d; (void)n; return 0; }"
    command = ["clang", "-x", "c", SANITIZE, "-o", os.devnull, "-"]
    return subprocess.run(command, input=code, capture_output=True, check=False).returncode == 0


def build(fuzzer: Fuzzer, directory: Path) -> Path:
    """Compiles it; returns what to run.

    Raises:
        subprocess.CalledProcessError: it does not compile; the compiler has said why.
    """
    if not fuzzer.sources:
        return HERE / f"fuzz_{fuzzer.name}.py"
    binary = directory / f"fuzz_{fuzzer.name}"
    sources = [path for pattern in fuzzer.sources for path in sorted((ROOT / "csrc").glob(pattern))]
    subprocess.run(
        [
            "clang",
            *CFLAGS,
            SANITIZE,
            f"-I{ROOT / 'csrc'}",
            f"-I{ROOT / 'csrc/include'}",
            str(HERE / f"fuzz_{fuzzer.name}.c"),
            *map(str, sources),
            *(f"-Wl,--wrap={name}" for name in fuzzer.wraps),
            "-o",
            str(binary),
        ],
        check=True,
    )
    return binary


def _command(fuzzer: Fuzzer, target: Path, directory: Path, seconds: float) -> list[str]:
    corpus = directory / "corpus" / fuzzer.name
    findings = directory / "findings" / fuzzer.name
    for path in (corpus, findings):
        path.mkdir(parents=True, exist_ok=True)
    from fuzz import seeds

    seeds.write(fuzzer.name, directory / "seeds" / fuzzer.name)
    start = [str(target)] if fuzzer.sources else [sys.executable, str(target)]
    if not fuzzer.sources and importlib.util.find_spec("atheris") is None:
        return [*start, "--seconds", f"{seconds:g}"]
    return [
        *start,
        str(corpus),
        str(directory / "seeds" / fuzzer.name),
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={fuzzer.bytes_max}",
        f"-artifact_prefix={findings}/",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]


def run(fuzzer: Fuzzer, directory: Path, seconds: float) -> int:
    """Builds it and runs it for that long; returns its exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    command = _command(fuzzer, build(fuzzer, directory), directory, seconds)
    log = directory / f"{fuzzer.name}.log"
    with log.open("w") as output:
        output.write(" ".join(command) + "\n")
        output.flush()
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=seconds + ENDING_S,
            check=False,
        )
    return done.returncode


def summary(fuzzer: Fuzzer, directory: Path) -> str:
    """How much it did, in a line."""
    wanted = {"number_of_executed_units": "inputs", "average_exec_per_sec": "per second"}
    found = []
    for line in (directory / f"{fuzzer.name}.log").read_text(errors="replace").splitlines():
        key, _, value = line.removeprefix("stat::").partition(":")
        if key in wanted:
            found.append(f"{value.strip()} {wanted[key]}")
    kept = len(list((directory / "corpus" / fuzzer.name).glob("*")))
    return ", ".join([*found, f"corpus of {kept}"])


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Runs the fuzzers one after the other.")
    parser.add_argument("--seconds", type=float, required=True, help="for each of them")
    parser.add_argument("--only", choices=[fuzzer.name for fuzzer in FUZZERS])
    parser.add_argument("--directory", type=Path, default=ROOT / "build/fuzz")
    args = parser.parse_args()
    bad = 0
    for fuzzer in FUZZERS:
        if args.only not in (None, fuzzer.name):
            continue
        if lacking := missing(fuzzer):
            print(f"fuzz: {fuzzer.name}: left out, {lacking}", flush=True)
            bad += 1
            continue
        print(f"fuzz: {fuzzer.name}: {args.seconds:g} s ...", flush=True)
        start_s = time.monotonic()
        code = run(fuzzer, args.directory.resolve(), args.seconds)
        took_s = time.monotonic() - start_s
        outcome = "no finding" if code == 0 else f"FINDING (exit {code})"
        print(
            f"fuzz: {fuzzer.name}: {outcome} in {took_s:.0f} s: {summary(fuzzer, args.directory)}; "
            f"log {args.directory / f'{fuzzer.name}.log'}",
            flush=True,
        )
        bad += code != 0
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
