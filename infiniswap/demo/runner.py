# SPDX-License-Identifier: Apache-2.0
"""The demo, step by step."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.demo import data, leftovers, legs, requirements, results, volume
from infiniswap.demo.donors import NAMES, DemoDonor, Served, stop_all
from infiniswap.demo.leftovers import Record
from infiniswap.demo.progress import Progress
from infiniswap.errors import ConflictError, SystemCallError, from_oserror
from infiniswap.system import loop
from infiniswap.system.interrupts import Interrupted, Interrupts
from infiniswap.system.userfault import far_refusal
from infiniswap.units import GIB, MIB, format_size, format_size_short, round_up

SCALE = "0.9"
"""TPC-H scale factor: the job then peaks at about 1.3 GiB of anonymous memory."""
DEVICE_BYTES = 2 * GIB
FAR_BYTES = 3 * GIB // 2
"""Size of each of the two areas in the job with far memory; its backup is as large as both."""
SLAB_BYTES = 256 * MIB
"""Smaller than the default of 1G, so that the swapped pages spread over both donors."""
POOL_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose.

    Attributes:
        parent: where the work directory is made.
        keep: keep the data for the next demo.
        scale: TPC-H scale factor.
    """

    parent: Path = leftovers.WORK_DIR
    keep: bool = False
    scale: str = SCALE


class Steps:
    """Announces the jobs.

    Args:
        progress: says so.
        count: how many jobs there will be.
    """

    def __init__(self, progress: Progress, count: int) -> None:
        self.progress = progress
        self._count = count
        self._number = 0

    def say(self, text: str) -> None:
        """The next job."""
        self._number += 1
        self.progress.say(f"job {self._number} of {self._count}: {text}")


def run(options: Options) -> results.Results:
    """Runs the demo, and leaves nothing behind, however it ends.

    Raises:
        InfiniswapError: a step failed. The caller judges the results.
    """
    progress = Progress()
    requirements.check(options.parent)
    with Interrupts() as interrupts, leftovers.only_one():
        for old in leftovers.stale():
            progress.say(f"removing what an earlier demo left behind ({old.demo_id})")
            with interrupts.hold():
                _swept(old)
        record = leftovers.new_record(options.parent)
        with _everything_undone(record, interrupts, progress):
            return _run(options, record, interrupts, progress)


def _swept(record: Record) -> None:
    failures = leftovers.sweep(record)
    if failures:
        raise ConflictError(
            f"not all of the demo could be removed: {'; '.join(failures)}",
            mend="Mend that, and run `infiniswap demo` again: it first removes the rest.",
        )


@contextlib.contextmanager
def _everything_undone(
    record: Record, interrupts: Interrupts, progress: Progress
) -> Iterator[None]:
    try:
        yield
    except Interrupted:
        progress.try_say("interrupted")
        raise
    finally:
        with interrupts.hold():
            failed = sys.exc_info()[1] is not None
            progress.try_say("removing everything that was made")
            failures = leftovers.sweep(record)
            for failure in failures:
                with contextlib.suppress(OSError):
                    print(f"infiniswap: not removed: {failure}", file=sys.stderr)
        if failures and not failed:
            raise SystemCallError(f"not all could be removed: {'; '.join(failures)}")


def _run(
    options: Options, record: Record, interrupts: Interrupts, progress: Progress
) -> results.Results:
    with interrupts.hold():
        leftovers.save(record)
        _make_work(record)
    source = _prepare_data(options, record, progress)
    config = _write_config(record)
    stage = legs.Stage(record, interrupts, source, config, DEVICE_BYTES, FAR_BYTES, SLAB_BYTES)

    no_far = far_refusal() or ""
    steps = Steps(progress, 3 if no_far else 4)
    steps.say("as much memory as it wants")
    first = legs.unlimited(stage)
    progress.say(
        f"  {first.elapsed_s:.1f} s, anonymous memory peaked at "
        f"{format_size_short(first.anon_peak_bytes)}"
    )
    limit_bytes = round_up(first.anon_peak_bytes // 2, MIB)

    disk, speed = _make_volume(record, interrupts, progress)
    ours, served = _infiniswap_legs(stage, limit_bytes, disk, steps, with_far=not no_far)
    if no_far:
        progress.say(f"no job with far memory: {no_far}")

    what = "this machine's disk" if disk.not_limited else "the cloud volume"
    steps.say(f"{format_size(limit_bytes)} of memory, swap on {what}")
    last = legs.with_disk(stage, limit_bytes, disk)
    _say_leg(progress, last)
    return results.Results(
        scale=options.scale,
        legs=(first, *ours, last),
        donors=served,
        throttle=disk.not_limited,
        disk_reads_per_s=speed.reads_per_s,
        disk_writes_per_s=speed.writes_per_s,
        total_s=progress.elapsed_s,
        no_far=no_far,
    )


def _make_work(record: Record) -> None:
    try:
        record.work.mkdir(mode=0o700)
    except OSError as error:
        raise from_oserror(
            "cannot make the work directory",
            error,
            where=record.work_dir,
            mend="Name another place with --dir.",
        ) from error


def _prepare_data(options: Options, record: Record, progress: Progress) -> Path:
    cached = data.cache_dir(options.scale)
    if data.is_complete(cached):
        progress.say(f"TPC-H data, scale factor {options.scale}: {cached}")
        return cached
    progress.say(f"making TPC-H data, scale factor {options.scale} (tpchgen-cli)")
    made = record.work / "data"
    data.generate(made, options.scale)
    size_bytes = sum(path.stat().st_size for path in data.files(made))
    progress.say(f"  {', '.join(data.TABLES)}: {format_size_short(size_bytes)} of Parquet")
    if not options.keep:
        return made
    kept = data.keep(made, options.scale)
    progress.say(f"  kept for the next demo: {kept}")
    return kept


def _write_config(record: Record) -> Path:
    """Configuration of the demo's daemons and device, in place of this host's own."""
    slab = format_size(SLAB_BYTES)
    path = record.work / "infiniswap.toml"
    try:
        record.secret.touch(mode=0o600, exist_ok=False)
        record.secret.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
        path.write_text(
            f'[cluster]\nsecret_file = "{record.secret}"\n'
            f'[daemon]\nslab = "{slab}"\nrun_dir = ""\nstate_dir = "{record.work}"\n'
            f'[device]\nslab = "{slab}"\nrun_dir = "{record.devices}"\n'
            f'backup_dir = "{record.work}"\n',
            encoding="utf-8",
        )
    except OSError as error:
        raise from_oserror("cannot write the configuration", error, where=str(path)) from error
    return path


def _make_volume(
    record: Record, interrupts: Interrupts, progress: Progress
) -> tuple[volume.Volume, volume.Speed]:
    progress.say("making a disk volume as slow as a common cloud volume: 3000 requests/s, 125 MB/s")
    with interrupts.hold():
        volume.make_image(record.image, DEVICE_BYTES)
        device = loop.attach(record.image)
        loop.tune(device, is_disk=True)
        disk = volume.Volume(device, record)
    speed = volume.measure(device, disk.io_cgroups, record.work)
    if not disk.not_limited:
        disk.not_limited = volume.too_fast(speed)
    progress.say(
        f"  measured: {speed.reads_per_s:.0f} reads/s, {speed.writes_per_s:.0f} writes/s of 4 KiB"
    )
    if disk.not_limited:
        progress.say(
            f"  NOT as slow as a cloud volume: {disk.not_limited}. The last job swaps to this "
            "machine's disk as fast as it is, and infiniswap's backup lies there too"
        )
    return disk, speed


def _infiniswap_legs(
    stage: legs.Stage, limit_bytes: int, disk: volume.Volume, steps: Steps, *, with_far: bool
) -> tuple[list[results.Leg], tuple[Served, ...]]:
    """The legs on donors, and what these served in the first of them."""
    progress = steps.progress
    progress.say(
        f"starting {len(NAMES)} donors, each a daemon that lends up to "
        f"{format_size_short(POOL_BYTES)}"
    )
    donors: list[DemoDonor] = []
    try:
        with stage.interrupts.hold():
            donors += (DemoDonor(name, stage.record, stage.config, POOL_BYTES) for name in NAMES)
        for donor in donors:
            donor.await_ready()
        before = [donor.served() for donor in donors]
        addresses = [donor.address for donor in donors]
        common = f"--local {format_size(limit_bytes)} --donors {','.join(map(str, addresses))}"
        steps.say(f"infiniswap run {common} --backup {disk.device.path} -- python job.py")
        found = [legs.with_infiniswap(stage, limit_bytes, addresses, disk)]
        served = tuple(
            Served(now.name, now.read_bytes - was.read_bytes, now.write_bytes - was.write_bytes)
            for now, was in zip([donor.served() for donor in donors], before, strict=True)
        )
        _say_leg(progress, found[0])
        progress.say(
            "  by the donors' own counters they served "
            + ", ".join(f"{format_size_short(donor.read_bytes)} ({donor.name})" for donor in served)
        )
        if with_far:
            steps.say(f"infiniswap run --paging far {common} -- python job.py")
            found.append(legs.with_far_memory(stage, limit_bytes, addresses))
            _say_leg(progress, found[1])
    finally:
        with stage.interrupts.hold():
            stop_all(donors)
    return found, served


def _say_leg(progress: Progress, leg: results.Leg) -> None:
    progress.say(
        f"  {leg.elapsed_s:.1f} s, {format_size_short(leg.page_out_bytes)} paged out, "
        f"{format_size_short(leg.page_in_bytes)} in"
    )
