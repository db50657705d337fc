# SPDX-License-Identifier: Apache-2.0
"""What `run --local` means, on made-up hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.machine.made_host import MadeHost

from infiniswap.cli.run.local import LOCAL_BYTES_MIN, parse_local
from infiniswap.errors import UsageError
from infiniswap.units import GIB, MIB


@pytest.fixture
def host(tmp_path: Path) -> MadeHost:
    """Of this process, which is in `/a/b`."""
    made = MadeHost(tmp_path, version=2, own="/a/b")
    for path in (".", "a", "a/b"):
        made.cgroup(path)
    return made


@pytest.mark.parametrize("text", ["4G", "4Gi", "4096M"])
def test_a_size_is_taken_as_it_is(host: MadeHost, text: str) -> None:
    local = parse_local(text, proc=host.proc)
    assert (local.limit_bytes, local.note) == (4 * GIB, "")


@pytest.mark.parametrize("text", ["3", "3Q", "33554433", "150%", ""])
def test_what_is_wrong_with_it_is_said_of_the_option(host: MadeHost, text: str) -> None:
    with pytest.raises(UsageError, match=f"^--local: {re.escape(repr(text))}"):
        parse_local(text, proc=host.proc)


def test_a_percentage_is_of_the_hosts_memory(host: MadeHost) -> None:
    local = parse_local("50%", proc=host.proc)
    assert local.limit_bytes == 8 * GIB
    assert local.note == "--local 50% is 8.00 GiB: this host has 16.0 GiB of memory"


def test_a_percentage_is_of_the_surrounding_cgroups_memory_where_that_is_less(
    host: MadeHost,
) -> None:
    host.cgroup("a", limit=2 * GIB)
    local = parse_local("25%", proc=host.proc)
    assert local.limit_bytes == 512 * MIB
    assert f"the cgroup {host.top / 'a'} may use 2.00 GiB" in local.note
    host.cgroup("a", limit=32 * GIB)
    assert parse_local("25%", proc=host.proc).limit_bytes == 4 * GIB


def test_a_percentage_comes_to_whole_pages(host: MadeHost) -> None:
    limit_bytes = parse_local("33.3%", proc=host.proc).limit_bytes
    assert limit_bytes % 4096 == 0
    assert 0 <= 16 * GIB * 333 // 1000 - limit_bytes < 4096


@pytest.mark.parametrize("text", ["8M", "0.01%", "0", "0M", "5000", "1M", "15M"])
def test_too_little_for_any_program_is_refused(host: MadeHost, text: str) -> None:
    with pytest.raises(UsageError, match="too little for any program") as caught:
        parse_local(text, proc=host.proc)
    assert caught.value.mend == "Give at least 16M."
    assert parse_local("16M", proc=host.proc).limit_bytes == LOCAL_BYTES_MIN


def test_a_limit_above_all_memory_is_told_to_limit_nothing(host: MadeHost) -> None:
    assert parse_local("16G", proc=host.proc).note == ""
    note = parse_local("1T", proc=host.proc).note
    assert note.startswith("warning: --local 1T limits nothing: this host has 16.0 GiB of memory.")


def test_a_limit_above_that_of_a_container_is_told_to_limit_nothing(host: MadeHost) -> None:
    host.cgroup(".", limit=2 * GIB)
    assert "limits nothing: the cgroup" in parse_local("3G", proc=host.proc).note
    # A job leaves the cgroups below the top, so their limits do not bind it.
    host.cgroup(".", limit=8 * GIB)
    host.cgroup("a", limit=2 * GIB)
    assert parse_local("3G", proc=host.proc).note == ""
