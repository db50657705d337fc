# SPDX-License-Identifier: Apache-2.0
"""What the device's process takes of its host: locked memory, stacks, idle processor time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from infiniswap.config import DeviceConfig
from infiniswap.system.files import PROC, try_read_text
from infiniswap.units import KIB, MIB, PAGE_BYTES, format_size_short
from isw_bench.bench import Bench, require_root
from isw_bench.children import Child, cpu_s
from isw_bench.cluster import device, donors
from isw_bench.results import Comparison, Figure, Samples, at_most

KEY = "process"
TITLE = "Processes: memory of the device, stacks, idle processor time"

_BASE_BYTES = 96 * MIB
_PER_MILLE_OF_SIZE = 7
_STACK_BYTES_MAX = 256 * KIB
_IDLE_SHARE_MAX = 0.003
_REST_S = 3.0
"""Until what starting has set off is done."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping of a process, from /proc/PID/smaps."""

    start: int
    end: int
    resident_bytes: int
    locked: bool
    name: str


_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")


def parse_smaps(text: str) -> list[Mapping]:
    """Mappings in the order of their addresses."""
    found: list[Mapping] = []
    head: re.Match[str] | None = None
    resident_bytes = 0
    for line in text.splitlines():
        match = _HEAD.fullmatch(line)
        if match:
            head, resident_bytes = match, 0
        elif line.startswith("Rss:"):
            resident_bytes = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and head is not None:
            start, end = int(head[1], 16), int(head[2], 16)
            found.append(Mapping(start, end, resident_bytes, "lo" in line.split(), head[3]))
    return found


def stack_bytes(pid: int, mappings: list[Mapping], *, proc: Path = PROC) -> dict[str, int]:
    """Size of the mapping that each thread's stack pointer lies in, by thread, the first thread
    aside: its stack is the kernel's and grows. A thread that runs just now has no pointer to
    read; idle ones have."""
    found: dict[str, int] = {}
    for task in sorted((proc / str(pid) / "task").iterdir()):
        fields = (try_read_text(task / "syscall") or "").split()
        if int(task.name) == pid or len(fields) < 3:
            continue
        pointer = int(fields[-2], 16)
        name = (try_read_text(task / "comm") or "?").strip()
        for mapping in mappings:
            if mapping.start <= pointer < mapping.end:
                found[f"{name}-{task.name}"] = mapping.end - mapping.start
    return found


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root.
    """
    require_root("a device")
    samples = Samples()
    size_bytes = bench.settings.process_bytes
    slab_bytes = max(MIB, size_bytes // 16)
    staging_bytes = DeviceConfig().staging_bytes
    bound_bytes = _BASE_BYTES + size_bytes * _PER_MILLE_OF_SIZE // 1000 + staging_bytes
    stacks: dict[str, int] = {}
    mappings: list[Mapping] = []
    with (
        donors(bench, 2, slab_bytes, 2 * slab_bytes) as daemons,
        device(bench, daemons, size_bytes, slab_bytes, "--swap", "--priority", "0") as own,
    ):
        time.sleep(min(_REST_S, bench.settings.idle_s))
        for _ in bench.rounds("idle processes"):
            pids = {"device": _of_device(own.pid)}
            pids |= {f"daemon {n}": [child.pid] for n, child in _numbered(daemons)}
            idle = _idle_shares(pids, bench.settings.idle_s)
            mappings = parse_smaps((PROC / str(own.pid) / "smaps").read_text())
            stacks = stack_bytes(own.pid, mappings)
            samples.add(
                "infiniswap",
                locked_mib=_status_int(own.pid, "VmLck") / 1024,
                resident_mib=_status_int(own.pid, "VmRSS") / 1024,
                unlocked_mib=_unlocked_bytes(mappings) / MIB,
                stack_kib=max(stacks.values(), default=0) / 1024,
                threads=len(stacks) + 1,
                device_idle_percent=idle["device"] * 100,
                daemon_idle_percent=max(v for k, v in idle.items() if k != "device") * 100,
            )
            samples.add(
                "bound",
                locked_mib=bound_bytes / MIB,
                unlocked_mib=PAGE_BYTES * 16 / MIB,
                stack_kib=_STACK_BYTES_MAX / 1024,
                idle_percent=_IDLE_SHARE_MAX * 100,
            )
    notes = [
        f"A device of {format_size_short(size_bytes)} with "
        f"{format_size_short(staging_bytes)} of staging, in use as swap, idle; two daemons.",
        f"{len(stacks)} threads besides the first, the largest stacks: {_largest(stacks)}.",
        "The bounds are the project's: 96 MiB + 7 ‰ of the size + staging, 256 KiB a stack, "
        "0.3 % of a core.",
        "Not locked and resident: " + (_unlocked_names(mappings) or "nothing") + ".",
    ]
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


def _largest(stacks: dict[str, int]) -> str:
    ordered = sorted(stacks.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {size // 1024} KiB" for name, size in ordered)


def _numbered(daemons: dict[str, Child]) -> list[tuple[int, Child]]:
    return list(enumerate(daemons.values(), 1))


def _of_device(pid: int) -> list[int]:
    """The device's process, its holder and its standby."""
    holder = _status_int(pid, "PPid")
    children = (PROC / str(holder) / "task" / str(holder) / "children").read_text()
    return [holder, *map(int, children.split())]


def _idle_shares(pids: dict[str, list[int]], seconds: float) -> dict[str, float]:
    """Processor time of the processes of each name over that time, as a share of a core."""

    def spent_s() -> dict[str, float]:
        return {name: sum(map(cpu_s, own)) for name, own in pids.items()}

    before, start_s = spent_s(), time.monotonic()
    time.sleep(seconds)
    after, took_s = spent_s(), time.monotonic() - start_s
    return {name: (after[name] - before[name]) / took_s for name in pids}


def _status_int(pid: int, key: str) -> int:
    for line in (try_read_text(PROC / str(pid) / "status") or "").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0


_KERNELS_OWN = ("[vvar]", "[vdso]", "[vsyscall]", "[vvar_vclock]")


def _unlocked(mappings: list[Mapping]) -> list[Mapping]:
    return [
        mapping
        for mapping in mappings
        if mapping.resident_bytes and not mapping.locked and mapping.name not in _KERNELS_OWN
    ]


def _unlocked_bytes(mappings: list[Mapping]) -> int:
    return sum(mapping.resident_bytes for mapping in _unlocked(mappings))


def _unlocked_names(mappings: list[Mapping]) -> str:
    return ", ".join(
        f"{mapping.name or 'anonymous'} {format_size_short(mapping.resident_bytes)}"
        for mapping in _unlocked(mappings)[:5]
    )


def figures(samples: Samples) -> list[Figure]:
    """The table: we beside the bound."""
    ours, bound = samples.values["infiniswap"], samples.values["bound"]

    def line(name: str, unit: str, key: str, bound_key: str) -> Figure:
        return Figure(name, unit, ours[key], bound[bound_key], "bound", target=at_most(1.0))

    return [
        line("device, locked memory", "MiB", "locked_mib", "locked_mib"),
        line("device, resident memory", "MiB", "resident_mib", "locked_mib"),
        line("device, resident but not locked", "MiB", "unlocked_mib", "unlocked_mib"),
        line("device, largest thread stack", "KiB", "stack_kib", "stack_kib"),
        line("device, idle", "% of a core", "device_idle_percent", "idle_percent"),
        line("busier daemon, idle", "% of a core", "daemon_idle_percent", "idle_percent"),
    ]
