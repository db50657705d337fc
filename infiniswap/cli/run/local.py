# SPDX-License-Identifier: Apache-2.0
"""What `run --local` means on this host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infiniswap.cli.common.parser import named
from infiniswap.errors import UsageError
from infiniswap.system.files import PROC
from infiniswap.system.job_cgroup import memory_for_jobs
from infiniswap.system.memory import Memory, host_memory
from infiniswap.units import (
    MIB,
    PAGE_BYTES,
    format_size,
    format_size_short,
    letter_meant,
    parse_page_size,
    parse_share,
    parse_size,
)

LOCAL_BYTES_MIN = 16 * MIB


@dataclass(frozen=True, slots=True)
class Local:
    """The memory limit of a job; `note` is what the user should know of it, or empty."""

    limit_bytes: int
    note: str = ""


def parse_local(text: str, *, proc: Path = PROC) -> Local:
    """A size, or a share such as `50%` of the memory that this process may use.

    Raises:
        UsageError: neither, or too little for any program.
        NotPermittedError, SystemCallError: the memory figures cannot be read.
    """
    with named("--local"):
        share = parse_share(text)
        limit_bytes, note = 0 if share else _parse_limit(text), ""
    if share is not None:
        memory = host_memory(proc=proc)
        limit_bytes = int(memory.total_bytes * share) // PAGE_BYTES * PAGE_BYTES
        note = f"--local {text} is {format_size_short(limit_bytes)}: {_whole(memory)}"
    if limit_bytes < LOCAL_BYTES_MIN:
        raise UsageError(
            f"--local {text} is too little for any program",
            mend=f"Give at least {format_size(LOCAL_BYTES_MIN)}.",
        )
    above = memory_for_jobs(proc=proc)
    if limit_bytes > above.total_bytes:
        note = (
            f"warning: --local {text} limits nothing: {_whole(above)}. The command is paged out "
            "only when that memory runs short"
        )
    return Local(limit_bytes, note)


def _parse_limit(text: str) -> int:
    """A size. One that is too little anyway is not told which other one would fit a page."""
    size_bytes = parse_size(text)
    is_mistyped = text.strip().isdecimal() and letter_meant(size_bytes)
    return size_bytes if size_bytes < LOCAL_BYTES_MIN and not is_mistyped else parse_page_size(text)


def _whole(memory: Memory) -> str:
    size = format_size_short(memory.total_bytes)
    if memory.limited_by == "host":
        return f"this host has {size} of memory"
    return f"the cgroup {memory.limited_by} may use {size} of memory"
