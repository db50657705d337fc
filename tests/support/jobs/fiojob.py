# SPDX-License-Identifier: Apache-2.0
"""fio on a device, once, or again and again until it is told to stop.

`Fio` verifies all that it wrote. Each pass writes the whole area twice. First checksums (crc32c),
with reads in between, verified soon after and once more at the end. Then a pattern that names pass
and offset, verified twice, one time by a process that has not written it: so an old page that comes
back is noticed, too, however right its checksum.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from support.devices.cluster import WAIT_S, environment, run
from support.machine.runmode import FULL

VERIFY = ("--verify=crc32c", "--verify_fatal=1")
_S_MAX = 5 * WAIT_S
"""Bound of one run of fio, which takes a few seconds where all is well."""

_SIZES = "--bssplit=4k/60:16k/30:64k/10"
_CHECKSUMS = ["--rw=randrw", "--rwmixread=40", "--verify=crc32c", "--verify_backlog=200", _SIZES]


def _pattern(number: int) -> list[str]:
    pattern = f"--verify_pattern=0x{number:08x}%o"
    return ["--rw=randwrite", _SIZES, "--verify=pattern", pattern, f"--randseed={number}"]


def fio(path: Path, *options: str) -> str:
    """Runs it once, past the kernel's cache; returns what it says."""
    return run(*_fio_on(path), "--name=v", *options)


def _fio_on(path: Path) -> list[str]:
    return ["fio", "--name=global", f"--filename={path}", "--ioengine=libaio", "--direct=1"]


def verify_every_block_size(path: Path) -> None:
    """From a page to a MiB."""
    jobs = []
    for kib in (4, 8, 16, 32, 64, 128, 256, 512, 1024) if FULL else (4, 64, 1024):
        jobs += [f"--name={kib}k", "--stonewall", "--rw=randwrite", f"--bs={kib}k"]
        jobs += [f"--size={max(2048, 8 * kib)}k"]
    run(*_fio_on(path), *VERIFY, "--iodepth=32", *jobs)


def stress_a_file_system(device: Path, point: Path) -> None:
    """Makes one, writes, discards, and finds it clean."""
    run("mkfs.ext4", "-q", "-F", device)
    run("mount", "-o", "discard", device, point)
    try:
        sizes = ("--bssplit=4k/60:32k/30:256k/10", "--size=6m", "--iodepth=32")
        # What one writes the other must not verify.
        both = ("--numjobs=2", "--offset_increment=6m", "--fsync=16")
        fio(point / "file", "--rw=randrw", *VERIFY, *sizes, *both)
        for number in range(64):
            (point / f"small{number}").write_bytes(os.urandom(7_001 * number + 1))
        for number in range(0, 64, 2):
            (point / f"small{number}").unlink()
        run("fstrim", point)
    finally:
        run("umount", point)
    run("e2fsck", "-f", "-n", device)


class Fio:
    """Runs it in a thread of its own.

    Args:
        target: options that name the device.
        mib: of the area.
        rate_mib: per second, of reads and of writes; the machine has other things to do.
        directory: for what fio writes besides.
    """

    def __init__(self, target: list[str], mib: int, rate_mib: int, directory: Path) -> None:
        self._argv = [
            "fio",
            "--name=verify",
            *target,
            f"--size={mib}m",
            "--iodepth=8",
            f"--rate={rate_mib}m,{rate_mib}m",
            "--verify_fatal=1",
            "--verify_state_save=0",
            f"--aux-path={directory}",
        ]
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._killed = threading.Event()
        self.passes = 0
        self.error = ""
        self._thread = threading.Thread(target=self._work, name=f"fio {target[-1]}")
        self._thread.start()

    def check(self) -> None:
        """Fails once fio has found anything wrong."""
        assert not self.error, self.error

    def stop(self) -> None:
        """Begins no further pass; does not wait."""
        self._stopping.set()

    def finish(self) -> None:
        """Lets it end its pass, and verifies everything once more."""
        self.stop()
        self._thread.join()
        self.check()
        assert self.passes, "fio has not come to the end of its first pass"
        self._again()
        self.check()

    def close(self) -> None:
        """Ends it whatever it does."""
        self._stopping.set()
        self._killed.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._thread.join()

    def _work(self) -> None:
        while not self.error and not (self._stopping.is_set() and self.passes):
            self._run(*_CHECKSUMS, f"--randseed={self.passes + 1}")
            self._run(*_pattern(self.passes + 1))
            self.passes += not self.error
            self._again()

    def _again(self) -> None:
        """Reads what the last pass has left."""
        self._run(*_pattern(self.passes), "--verify_only")

    def _run(self, *options: str) -> None:
        """The first failure is kept, and nothing is run after it."""
        if self.error or self._killed.is_set():
            return
        argv = [*self._argv, *options]
        self._process = subprocess.Popen(
            argv,
            cwd=self._directory,
            env=environment({"LC_ALL": "C"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if self._killed.is_set():  # it came between
            self._process.kill()
        try:
            output, _ = self._process.communicate(timeout=_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            output += f"\nnot at its end after {_S_MAX:g} s"
        if self._process.returncode != 0:
            self.error = f"{' '.join(argv)}: exit code {self._process.returncode}\n{output}"
