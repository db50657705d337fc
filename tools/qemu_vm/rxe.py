# SPDX-License-Identifier: Apache-2.0
"""`tools/vm --rxe`, outside: what this host must have, and what each machine then runs
(`rxe_guest`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from infiniswap.errors import UnavailableError, UsageError
from qemu_vm import cache, commands

ROOT = Path(__file__).resolve().parents[2]
PAGECHECK = ROOT / "tests" / "system" / "pagecheck.c"
HOSTS_MIN = 2
PROVIDER = Path("/etc/libibverbs.d/rxe.driver")
_NEEDED = ("ip", "rdma", "cc")
_CC_S = 120.0
DEMO = "demo"


def check(hosts: int) -> None:
    """Raises what is in the way, before anything is booted.

    Args:
        hosts: how many machines.

    Raises:
        UsageError: too few machines.
        UnavailableError: programs or libraries are missing; names the packages.
    """
    if hosts < HOSTS_MIN:
        raise UsageError(
            "--rxe needs a network: a consumer, the last machine, and donors, all others",
            mend="For example: --hosts 3.",
        )
    if packages := missing():
        raise UnavailableError(
            "soft-RoCE in virtual machines needs programs and libraries of this host's that are "
            "not installed",
            mend=f"On Debian: apt-get install {' '.join(packages)}. Then `make setup`.",
        )
    if not (Path(sys.executable).parent / "infiniswap").exists():
        raise UnavailableError("Infiniswap is not built here", mend="Run `make setup`.")


def missing() -> list[str]:
    """Debian's packages that this host lacks for it."""
    packages = {commands.PACKAGES[program] for program in _NEEDED if not _has(program)}
    if not PROVIDER.exists():
        packages.add("ibverbs-providers")
    return sorted(packages)


def _has(program: str) -> bool:
    try:
        commands.find(program)
    except UnavailableError:
        return False
    return True


def pagecheck() -> Path:
    """The job's program, built where it is not in the cache.

    Raises:
        SystemCallError: the compiler failed.
    """

    def make(inner: Path) -> None:
        argv = ("cc", "-std=gnu11", "-O2", "-o", str(inner / "pagecheck"), str(PAGECHECK))
        commands.run(*argv, bound_s=_CC_S, what="cannot build the demo's job")

    return cache.entry("pagecheck", cache.key(PAGECHECK.read_bytes()), make) / "pagecheck"


def command(words: Sequence[str]) -> tuple[str, ...]:
    """What every machine runs.

    Args:
        words: a command, or none for the demo.
    """
    inside = ["--", *words] if words else [DEMO]
    return (sys.executable, "-B", "-m", "qemu_vm.rxe_guest", *inside)


def environment(*, demo: bool) -> dict[str, str]:
    """Variables of that command."""
    found = {"PYTHONPATH": str(ROOT / "tools")}
    if demo:
        found["INFINISWAP_VM_PAGECHECK"] = str(pagecheck())
    return found
