# SPDX-License-Identifier: Apache-2.0
"""The job, once each way: without a limit, with infiniswap by swap and by far memory, and with disk
swap."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infiniswap.demo import data, leftovers
from infiniswap.demo.children import Child, mortal, placed
from infiniswap.demo.leftovers import Record
from infiniswap.demo.results import DISK, FAR, INFINISWAP, UNLIMITED, Leg
from infiniswap.demo.volume import Volume
from infiniswap.device.jobs import usage
from infiniswap.errors import InfiniswapError, MemoryLimitError, SystemCallError, from_oserror
from infiniswap.system import loop, swap
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.files import SYS, log_tail, read_text
from infiniswap.system.interrupts import Interrupts
from infiniswap.system.programs import infiniswap, python
from infiniswap.units import HostPort, format_size

JOB = Path(__file__).with_name("job.py")
_SAMPLE_S = 0.02
_LEG_S_MAX = 900.0
_RUN_END_S = 120.0
_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Stage:
    """What the legs have in common.

    Attributes:
        record: names.
        interrupts: to hold signals with.
        source: the data.
        config: configuration file of the demo's daemons and device.
        device_bytes: size of the swap device, with infiniswap and on the disk.
        far_bytes: size of the swap device, and of far memory beside it, in that leg.
        slab_bytes: as the donors lend.
    """

    record: Record
    interrupts: Interrupts
    source: Path
    config: Path
    device_bytes: int
    far_bytes: int
    slab_bytes: int

    def command(self, leg: str) -> list[str]:
        """The job itself; the same in every leg but for its output directory."""
        return python(str(JOB), str(self.source), str(self.target(leg)))

    def target(self, leg: str) -> Path:
        """Where the job of a leg writes."""
        return self.record.work / f"output-{leg}"

    def log(self, leg: str) -> Path:
        """What the job of a leg printed."""
        return self.record.work / f"{leg}.log"


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file, by name.

    Raises:
        SystemCallError, NotPermittedError: unreadable.
    """
    found = {}
    try:
        for path in sorted(directory.iterdir()):
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise from_oserror("cannot read a job's output", error, where=str(directory)) from error
    return found


def _make_cgroup(stage: Stage, leg: str, limit_bytes: int) -> MemoryCgroup:
    with stage.interrupts.hold():  # swept by its name
        return create_memory_cgroup(stage.record.cgroup_name(leg), limit_bytes)


def _run_in(
    stage: Stage,
    leg: Leg,
    cgroup: MemoryCgroup,
    cgroups: Sequence[Path],
    area: str = "",
) -> Leg:
    """Runs the job in a memory cgroup, which is removed at the end; fills in what it measured."""
    data.forget_cached_pages(data.files(stage.source))
    command = placed(stage.command(leg.name), cgroups)
    sampler = usage.Sampler(cgroup, area)
    start_s = time.monotonic()
    child = Child(f"the {leg.name} job", mortal(command, signal.SIGKILL), stage.log(leg.name))
    try:
        code = child.wait(_LEG_S_MAX, sampler.sample, _SAMPLE_S)
        elapsed_s = time.monotonic() - start_s
        if code and cgroup.memory().oom_kills:
            raise MemoryLimitError(
                f"the {leg.name} job was killed for lack of memory",
                mend="End other programs, and see dmesg.",
            )
        child.check(code)
    finally:
        with stage.interrupts.hold():
            child.end(1.0)
            cgroup.kill()
            cgroup.remove()
    return replace(
        leg,
        elapsed_s=elapsed_s,
        anon_peak_bytes=sampler.peaks.anon,
        other_swap_bytes=sampler.peaks.others,
        output=digests(stage.target(leg.name)),
    )


def unlimited(stage: Stage) -> Leg:
    """The job with all the memory it wants; what it takes decides the limit of the others."""
    cgroup = _make_cgroup(stage, UNLIMITED, leftovers.NO_LIMIT_BYTES)
    return _run_in(stage, Leg(UNLIMITED, "enough memory"), cgroup, [cgroup.path])


def with_infiniswap(
    stage: Stage, limit_bytes: int, donors: Sequence[HostPort], disk: Volume
) -> Leg:
    """The job under `infiniswap run`, as anybody would call it, with its backup on the disk volume.

    Raises:
        InfiniswapError: it failed; says what it printed.
    """
    leg = Leg(INFINISWAP, "infiniswap", limit_bytes)
    options = ("--size", format_size(stage.device_bytes), "--backup", str(disk.device.path))
    return _run_on(stage, leg, donors, options, disk.io_cgroups)


def with_far_memory(stage: Stage, limit_bytes: int, donors: Sequence[HostPort]) -> Leg:
    """The same with far memory; the backup is a file on this machine's disk.

    Raises:
        InfiniswapError: it failed; says what it printed.
    """
    leg = Leg(FAR, "infiniswap, far memory", limit_bytes)
    options = ("--paging", "far", "--size", format_size(stage.far_bytes))
    return _run_on(stage, leg, donors, options, ())


def _run_on(
    stage: Stage,
    leg: Leg,
    donors: Sequence[HostPort],
    options: Sequence[str],
    cgroups: Sequence[Path],
) -> Leg:
    """The job under `infiniswap run` with these options, within these cgroups."""
    data.forget_cached_pages(data.files(stage.source))
    summary_path = stage.record.work / f"summary-{leg.name}.json"
    argv = infiniswap(
        *("run", "--config", str(stage.config), "--local", format_size(leg.limit_bytes or 0)),
        *("--slab", format_size(stage.slab_bytes), "--donors", ",".join(map(str, donors))),
        *options,
        *("--quiet", "--summary-json", str(summary_path), "--"),
        *stage.command(leg.name),
    )
    command = mortal(placed(argv, cgroups), signal.SIGTERM)
    child = Child("infiniswap run", command, stage.log(leg.name))
    try:
        child.check(child.wait(_LEG_S_MAX, lambda: None, 0.1))
    except InfiniswapError as error:
        raise _with_device_log(error, stage.record) from error
    finally:
        with stage.interrupts.hold():
            child.end(_RUN_END_S)
    return replace(
        measured(leg, _read_summary(summary_path)), output=digests(stage.target(leg.name))
    )


def measured(leg: Leg, summary: Mapping[str, Any]) -> Leg:
    """The leg with what the summary of `infiniswap run` says.

    Raises:
        SystemCallError: something is missing there.
    """
    try:
        why, far = summary["page_in_backup_why"], summary["far"]
        return replace(
            leg,
            page_in_disk_bytes=summary["page_in_backup_bytes"],
            page_in_chosen_bytes=why["quicker"] + why["measured"],
            far_out_bytes=far["out_bytes"] if far else 0,
            **{key: summary[key] for key in _SUMMARY_KEYS},
        )
    except KeyError as error:
        raise SystemCallError(
            f"`infiniswap run` left no usable summary: it has no {error}"
        ) from error


def _with_device_log(error: InfiniswapError, record: Record) -> InfiniswapError:
    """The error with the last lines of the device's log, which is removed with the demo."""
    said = [log_tail(path) for path in sorted(record.devices.glob("*/log"))]
    text = "; the device said: ".join([error.what, *filter(None, said)])
    return SystemCallError(text, where=error.where, mend=error.mend)


_SUMMARY_KEYS = (
    "elapsed_s",
    "anon_peak_bytes",
    "page_in_bytes",
    "page_out_bytes",
    "page_in_us_p50",
    "page_in_us_p99",
    "page_in_staging_bytes",
    "other_swap_bytes",
)


def _read_summary(path: Path) -> Mapping[str, Any]:
    try:
        summary: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # Without the file's name: it is deleted with everything else of the demo.
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise SystemCallError(f"`infiniswap run` left no usable summary: {why}") from error
    return summary


@dataclass(frozen=True, slots=True)
class DiskIo:
    """Totals of a block device."""

    reads: int
    read_bytes: int
    read_ms: int
    write_bytes: int


def parse_disk_stat(text: str) -> DiskIo:
    """From the text of /sys/block/NAME/stat.

    Raises:
        SystemCallError: not such a text.
    """
    try:
        numbers = [int(field) for field in text.split()]
        reads, _, read_sectors, read_ms, _, _, write_sectors = numbers[:7]
    except ValueError:
        raise SystemCallError(f"{text.strip()!r} are no disk statistics") from None
    return DiskIo(reads, read_sectors * _SECTOR_BYTES, read_ms, write_sectors * _SECTOR_BYTES)


def _disk_io(device: loop.LoopDevice) -> DiskIo:
    path = SYS / "block" / device.path.name / "stat"
    return parse_disk_stat(read_text(path, "cannot read the disk statistics"))


def with_disk(stage: Stage, limit_bytes: int, disk: Volume) -> Leg:
    """The job with swap on the disk volume.

    Raises:
        InfiniswapError: it failed; says what it printed.
    """
    interrupts = stage.interrupts
    try:
        with interrupts.hold():
            upper = loop.attach(disk.device.path)
            loop.tune(upper, is_disk=True)
            swap.mkswap(upper.path, label="isw-demo")
            priority = swap.priority_above(swap.active_areas())
            swap.swapon(upper.path, priority=priority, discard=False)
        cgroup = _make_cgroup(stage, DISK, limit_bytes)
        disk.enter(cgroup)
        before = _disk_io(upper)
        leg = Leg(DISK, "disk swap" if disk.not_limited else "cloud disk swap", limit_bytes)
        leg = _run_in(stage, leg, cgroup, disk.job_cgroups(cgroup), str(upper.path))
        after = _disk_io(upper)
    finally:
        with interrupts.hold():
            leftovers.release_swap(disk.device)
    reads = after.reads - before.reads
    return replace(
        leg,
        page_in_bytes=after.read_bytes - before.read_bytes,
        page_out_bytes=after.write_bytes - before.write_bytes,
        page_in_us_mean=(after.read_ms - before.read_ms) * 1000 / reads if reads else None,
    )
