# SPDX-License-Identifier: Apache-2.0
"""What `run --local` means, on made-up hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infiniswap.cli.run.local import LOCAL_BYTES_MIN, parse_local
from infiniswap.errors import UsageError
from infiniswap.units import GIB, MIB


class Host:
    """16 GiB of memory, and cgroups of version 2; this process is in `/a/b`."""

    def __init__(self, root: Path) -> None:
        self.proc, self.top = root / "proc", root / "cgroup"
        own = self.proc / "self"
        own.mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: 4096 kB\n")
        (own / "cgroup").write_text("0::/a/b\n")
        (own / "mountinfo").write_text(f"1 0 0:1 / {self.top} rw - cgroup2 none rw\n")
        for path in (self.top, self.top / "a", self.top / "a/b"):
            path.mkdir()
            (path / "memory.stat").write_text("anon 0\nfile 0\n")
            (path / "memory.current").write_text("0\n")
            (path / "memory.max").write_text("max\n")
        (self.top / "cgroup.controllers").write_text("memory\n")

    def limit(self, cgroup: str, limit_bytes: int) -> None:
        (self.top / cgroup / "memory.max").write_text(f"{limit_bytes}\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("text", ["4G", "4Gi", "4096M"])
def test_a_size_is_taken_as_it_is(host: Host, text: str) -> None:
    local = parse_local(text, proc=host.proc)
    assert (local.limit_bytes, local.note) == (4 * GIB, "")


@pytest.mark.parametrize("text", ["3", "3Q", "0", "150%", ""])
def test_what_is_wrong_with_it_is_said_of_the_option(host: Host, text: str) -> None:
    with pytest.raises(UsageError, match=f"^--local: {re.escape(repr(text))}"):
        parse_local(text, proc=host.proc)


def test_a_percentage_is_of_the_hosts_memory(host: Host) -> None:
    local = parse_local("50%", proc=host.proc)
    assert local.limit_bytes == 8 * GIB
    assert local.note == "--local 50% is 8.00 GiB: this host has 16.0 GiB of memory"


def test_a_percentage_is_of_the_surrounding_cgroups_memory_where_that_is_less(host: Host) -> None:
    host.limit("a", 2 * GIB)
    local = parse_local("25%", proc=host.proc)
    assert local.limit_bytes == 512 * MIB
    assert f"the cgroup {host.top / 'a'} may use 2.00 GiB" in local.note
    host.limit("a", 32 * GIB)
    assert parse_local("25%", proc=host.proc).limit_bytes == 4 * GIB


def test_a_percentage_comes_to_whole_pages(host: Host) -> None:
    limit_bytes = parse_local("33.3%", proc=host.proc).limit_bytes
    assert limit_bytes % 4096 == 0
    assert 0 <= 16 * GIB * 333 // 1000 - limit_bytes < 4096


@pytest.mark.parametrize("text", ["8M", "0.01%"])
def test_too_little_for_any_program_is_refused(host: Host, text: str) -> None:
    with pytest.raises(UsageError, match="too little for any program") as caught:
        parse_local(text, proc=host.proc)
    assert caught.value.mend == "Give at least 16M."
    assert parse_local("16M", proc=host.proc).limit_bytes == LOCAL_BYTES_MIN


def test_a_limit_above_all_memory_is_told_to_limit_nothing(host: Host) -> None:
    assert parse_local("16G", proc=host.proc).note == ""
    note = parse_local("1T", proc=host.proc).note
    assert note.startswith("warning: --local 1T limits nothing: this host has 16.0 GiB of memory.")


def test_a_limit_above_that_of_a_container_is_told_to_limit_nothing(host: Host) -> None:
    host.limit(".", 2 * GIB)
    assert "limits nothing: the cgroup" in parse_local("3G", proc=host.proc).note
    # A job leaves the cgroups below the top, so their limits do not bind it.
    host.limit(".", 8 * GIB)
    host.limit("a", 2 * GIB)
    assert parse_local("3G", proc=host.proc).note == ""
