# SPDX-License-Identifier: Apache-2.0
"""Inputs of the jobs: made by the suite's own programs, kept in the output directory for the next
run there."""

from __future__ import annotations

import shutil
from pathlib import Path

from isw_bench.apps.jobs import AppJob
from isw_bench.bench import Bench


def directory(output: Path, job: AppJob, size: float) -> Path:
    """Where a job's input of that size lies. Jobs that make the same share it."""
    return output / "inputs" / f"{job.input_name}-{size:g}-{job.input_digest()}"


def prepare(bench: Bench, output: Path, job: AppJob, size: float) -> Path:
    """The input; it is made when it is not there, and moved to its place only when it is whole.

    Raises:
        SystemCallError, DeadlineError: it could not be made.
    """
    target = directory(output, job, size)
    if target.is_dir():
        return target
    bench.say(f"making the input of {job.key}")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    part.mkdir()
    try:
        job.make(bench, part, size)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target
