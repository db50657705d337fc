# SPDX-License-Identifier: Apache-2.0
"""KVM where it works, else QEMU's own translation of instructions (TCG): 10 times slower, and
it works everywhere.

That /dev/kvm can be opened says little: inside some virtual machines a guest then never runs its
first instruction, or QEMU ends. So a kernel is booted once, and the answer is kept until the host
boots again.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from infiniswap.errors import UnavailableError, UsageError
from qemu_vm import cache, commands, qemu
from qemu_vm.kernels import Kernel

CHOICES = ("auto", "kvm", "tcg")
VARIABLE = "INFINISWAP_VM_ACCEL"
_PROBE_S = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def wanted(option: str) -> str:
    """One of CHOICES: the option's, or else INFINISWAP_VM_ACCEL's.

    Raises:
        UsageError: it is none of them.
    """
    chosen = option or os.environ.get(VARIABLE) or "auto"
    if chosen not in CHOICES:
        raise UsageError(f"{chosen!r} is no accelerator: {', '.join(CHOICES)}", where=VARIABLE)
    return chosen


def choose(choice: str, kernel: Kernel, initrd: Path) -> str:
    """ "kvm" or "tcg".

    Args:
        choice: one of CHOICES.
        kernel, initrd: what would be booted.

    Raises:
        UnavailableError: KVM was chosen and does not work.
    """
    if choice == "tcg":
        return "tcg"
    why = _why_not(kernel, initrd)
    if not why:
        return "kvm"
    if choice == "kvm":
        raise UnavailableError(
            f"KVM cannot be used here: {why}",
            where="/dev/kvm",
            mend="Leave the choice to tools/vm (--accel auto): it works without KVM, only slower.",
        )
    return "tcg"


def _why_not(kernel: Kernel, initrd: Path) -> str:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return str(error.strerror)
    boot = _BOOT_ID.read_bytes()
    with cache.locked("kvm"):
        answer = cache.directory() / f"kvm-{cache.key(boot, kernel.release)}"
        if not answer.exists():
            for old in cache.directory().glob("kvm-*"):
                old.unlink()
            answer.write_text(_probe(kernel, initrd))
        return answer.read_text()


def _probe(kernel: Kernel, initrd: Path) -> str:
    """Boots once; empty when that worked."""
    argv = qemu.probe_line("kvm", kernel, initrd)
    command = commands.dying_with_us(*argv)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"/dev/kvm is there, but a kernel did not start with it in {_PROBE_S:g} s"
    if done.returncode == qemu.PROBE_STATUS:
        return ""
    words = done.stderr.decode(errors="replace").strip().splitlines()
    return f"/dev/kvm is there, but QEMU failed with it: {words[0] if words else done.returncode}"
