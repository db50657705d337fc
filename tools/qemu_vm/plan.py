# SPDX-License-Identifier: Apache-2.0
"""What is to be run, and where: plain data."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infiniswap.errors import UnavailableError, UsageError
from infiniswap.own_code import CODE_OWNER
from infiniswap.units import GIB, MIB
from qemu_vm import commands

HOSTS_MAX = 8
MEMORY_MIN = 256 * MIB
_NETWORK = "10.88.0"
_HIDDEN = ("/dev", "/proc", "/run", "/sys", "/var/tmp")
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TERM")
_PASSED_PREFIX = "INFINISWAP_"
_NOT_PASSED = ("INFINISWAP_VM_CACHE", "INFINISWAP_VM_MIRROR", "INFINISWAP_VM_ACCEL")


@dataclass(frozen=True, slots=True)
class Plan:
    """One call of tools/vm.

    Attributes:
        command: what runs in every machine; its exit status is the result.
        kernel: one of kernels.SUITES.
        hosts: how many machines.
        memory_bytes: of each.
        cpus: of each.
        disk_bytes: size of the scratch disk of each, on /var/tmp; its file is sparse.
        share: directory of the host's that guests can write to, as /run/vm/share; None for one
            that is removed afterwards.
        accel: one of accel.CHOICES.
        timeout_s: longest time the command may take, None for any; boot_s: until it starts.
        env: the command's environment.
        directory: the command's working directory.
        terminal: the command gets this terminal.
    """

    command: tuple[str, ...]
    kernel: str
    hosts: int = 1
    memory_bytes: int = GIB
    cpus: int = 2
    disk_bytes: int = 8 * GIB
    share: Path | None = None
    accel: str = "auto"
    timeout_s: float | None = None
    boot_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    directory: Path = Path("/")
    terminal: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the machines."""
        return tuple(f"h{number}" for number in range(1, self.hosts + 1))

    def address(self, name: str) -> str:
        """Of a machine on the virtual network."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"


def check(plan: Plan) -> None:
    """Raises UsageError for what cannot be."""
    if not 1 <= plan.hosts <= HOSTS_MAX:
        raise UsageError(f"{plan.hosts} machines: 1 to {HOSTS_MAX} can be had")
    if plan.memory_bytes < MEMORY_MIN:
        raise UsageError("a machine needs 256M of memory at least")
    if plan.terminal and plan.hosts > 1:
        raise UsageError("a shell is in one machine")
    hidden = next((top for top in _HIDDEN if plan.directory.is_relative_to(top)), None)
    if hidden is not None:
        raise UsageError(
            f"a guest has a {hidden} of its own, so it cannot see that directory",
            where=str(plan.directory),
            mend="Run it from a directory elsewhere; the checkout has to be elsewhere, too.",
        )
    if plan.share is not None and not plan.share.is_dir():
        raise UsageError("no such directory", where=str(plan.share))


def environment(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What a command in the guest finds: a few variables, ours, and those that were named.

    Args:
        given: "NAME" passes it on, "NAME=VALUE" sets it.
        environ: the caller's.

    Raises:
        UsageError: a variable is named that is not set.
    """
    env = {
        name: value
        for name, value in environ.items()
        if name in _PASSED or (name.startswith(_PASSED_PREFIX) and name not in _NOT_PASSED)
    }
    # Root of a guest finds the checkout as it is here.
    env[CODE_OWNER] = str(Path(__file__).stat().st_uid)
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: there is no such variable")
        env[name] = value if equals else environ[name]
    return env


def check_host() -> None:
    """Raises UnavailableError where machines cannot be had: another architecture, no QEMU."""
    if platform.machine() != "x86_64":
        raise UnavailableError(f"virtual machines need x86_64, and this is {platform.machine()}")
    for program in ("qemu-system-x86_64", "busybox", "mkfs.ext4", "setpriv"):
        commands.find(program)
