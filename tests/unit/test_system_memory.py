# SPDX-License-Identifier: Apache-2.0
"""Memory figures of hosts and containers, on made-up /proc and cgroup trees."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.made_host import MadeHost

from infiniswap.donor import memory as donor_memory
from infiniswap.errors import SystemCallError, UnavailableError
from infiniswap.system import memory
from infiniswap.system.files import parse_key_values
from infiniswap.units import GIB, MIB


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def test_without_limits_the_host_counts(tmp_path: Path, version: int) -> None:
    host = MadeHost(tmp_path, version=version, own="/a/b")
    for path in (".", "a", "a/b"):
        host.cgroup(path, usage=GIB)
    got = memory.host_memory(proc=host.proc)
    assert got == memory.Memory(16 * GIB, 8 * GIB, "host")


def test_the_tightest_limit_of_the_chain_counts(tmp_path: Path, version: int) -> None:
    host = MadeHost(tmp_path, version=version, own="/a/b")
    host.cgroup(".", usage=GIB)
    host.cgroup("a", limit=2 * GIB, usage=GIB + 512 * MIB, file=256 * MIB)
    host.cgroup("a/b", limit=4 * GIB, usage=GIB)
    got = memory.host_memory(proc=host.proc)
    assert got.total_bytes == 2 * GIB
    assert got.available_bytes == 768 * MIB  # 2048 - 1536 + 256: file cache can go
    assert got.limited_by == str(host.top / "a")


def test_a_wide_limit_leaves_the_hosts_available_memory(tmp_path: Path, version: int) -> None:
    host = MadeHost(tmp_path, version=version, own="/a")
    host.cgroup(".", usage=GIB)
    host.cgroup("a", limit=12 * GIB)
    got = memory.host_memory(proc=host.proc)
    assert (got.total_bytes, got.available_bytes) == (12 * GIB, 8 * GIB)


def test_a_container_that_sees_only_its_own_cgroup(tmp_path: Path, version: int) -> None:
    """The path starts at the host's root, the mount shows the container's directory."""
    host = MadeHost(tmp_path, version=version, own="/docker/abc", mount_root="/docker/abc")
    host.cgroup(".", limit=GIB)
    assert memory.host_memory(proc=host.proc).total_bytes == GIB


@pytest.mark.parametrize("own", ["/../other", "/elsewhere/x"])
def test_a_cgroup_that_is_not_visible(tmp_path: Path, version: int, own: str) -> None:
    host = MadeHost(tmp_path, version=version, own=own, mount_root="/")
    host.cgroup(".", limit=GIB)
    assert memory.memory_hierarchy(proc=host.proc).own == host.top


def test_without_memory_cgroups_the_host_counts(tmp_path: Path) -> None:
    host = MadeHost(tmp_path, version=2, own="/")
    (host.top / "cgroup.controllers").write_text("cpu io\n")
    assert memory.host_memory(proc=host.proc).limited_by == "host"
    with pytest.raises(UnavailableError, match="memory cgroups"):
        memory.memory_hierarchy(proc=host.proc)


def test_version_1_where_version_2_has_no_memory_controller(tmp_path: Path) -> None:
    host = MadeHost(tmp_path, version=1, own="/job")
    host.cgroup("job", limit=GIB)
    unified = tmp_path / "unified"
    unified.mkdir()
    (unified / "cgroup.controllers").write_text("\n")
    info = host.proc / "self" / "mountinfo"
    info.write_text(f"41 31 0:38 / {unified} rw - cgroup2 cgroup2 rw\n" + info.read_text())
    got = memory.memory_hierarchy(proc=host.proc)
    assert (got.version, got.own) == (1, host.top / "job")


def test_the_figures_of_a_cgroup(tmp_path: Path, version: int) -> None:
    host = MadeHost(tmp_path, version=version, own="/")
    got = memory.cgroup_memory(host.cgroup("a", limit=GIB, usage=5, file=3), version)
    assert (got.limit_bytes, got.usage_bytes, got.anon_bytes) == (GIB, 5, 7)
    assert (got.file_bytes, got.swap_bytes, got.oom_kills) == (3, 11, 2)
    assert got.peak_bytes == (6 if version == 1 else None)
    assert got.available_bytes == GIB - 2


def test_what_a_process_has_given_up_is_not_needed(tmp_path: Path, version: int) -> None:
    prefix = "" if version == 2 else "total_"
    lists = ("inactive_anon", "active_anon", "unevictable", "inactive_file")
    lines = [f"{prefix}{name} {value}" for name, value in zip(lists, (1, 2, 4, 8), strict=True)]
    (tmp_path / "memory.stat").write_text("\n".join([*lines, "total_swap 16", ""]))
    (tmp_path / "memory.swap.current").write_text("16\n")
    assert memory.cgroup_needs(tmp_path, version) == 23


def test_file_cache_never_makes_more_room_than_there_is_usage() -> None:
    figures = memory.CgroupMemory(100, 50, None, 0, 80, None, None)
    assert figures.available_bytes == 100


def test_a_cgroup_that_is_gone_is_an_error(tmp_path: Path, version: int) -> None:
    with pytest.raises(SystemCallError, match="gone"):
        memory.cgroup_memory(tmp_path / "gone", version)


@pytest.mark.parametrize("huge_kib", [8388608, 999999999])  # the second is of the host around it
def test_reserved_huge_pages_are_no_memory_to_lend(tmp_path: Path, huge_kib: int) -> None:
    """8 GiB of 16 are nobody's but of programs that ask for huge pages."""
    host = MadeHost(tmp_path, version=2, own="/")
    with (host.proc / "meminfo").open("a") as meminfo:
        meminfo.write(f"HugePages_Total: 4096\nHugepagesize: 2048 kB\nHugetlb: {huge_kib} kB\n")
    found = memory.host_memory(proc=host.proc)
    assert (found.total_bytes, found.available_bytes) == (8 * GIB, 8 * GIB)


def test_meminfo_without_memavailable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(SystemCallError, match="MemAvailable"):
        memory.machine_memory(proc=tmp_path)


@given(st.text())
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    memory.parse_meminfo(text)
    memory.parse_process_cgroups(text)


@given(st.dictionaries(st.from_regex(r"[A-Za-z_()]{1,20}", fullmatch=True), st.integers(0, 2**50)))
def test_meminfo_comes_back_in_bytes(values: dict[str, int]) -> None:
    text = "".join(f"{name}:   {value} kB\n" for name, value in values.items())
    assert memory.parse_meminfo(text) == {name: value * 1024 for name, value in values.items()}


def test_this_machine() -> None:
    got = memory.host_memory()
    assert 0 < got.available_bytes <= got.total_bytes


def test_refaults_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text(
        "nr_inactive_file 5\nnr_active_file 7\nworkingset_refault_anon 9\n"
        "workingset_refault_file 3\n"
    )
    assert memory.machine_cache(proc=tmp_path) == memory.Cache(12 * 4096, 3 * 4096)
    (tmp_path / "vmstat").write_text("nr_inactive_file 5\nworkingset_refault 3\n")
    assert memory.machine_cache(proc=tmp_path) is None  # before Linux 5.9


def test_refaults_of_a_cgroup(tmp_path: Path, version: int) -> None:
    prefix = "" if version == 2 else "total_"
    (tmp_path / "memory.stat").write_text(
        f"{prefix}inactive_file 8192\n{prefix}active_file 4096\n{prefix}workingset_refault_file 2\n"
    )
    assert memory.cgroup_cache(tmp_path, version) == memory.Cache(12288, 8192)
    (tmp_path / "memory.stat").write_text(f"{prefix}inactive_file 8192\n")
    assert memory.cgroup_cache(tmp_path, version) is None
    with pytest.raises(SystemCallError):
        memory.cgroup_cache(tmp_path / "gone", version)


@pytest.mark.parametrize("limit", [None, GIB])
def test_a_donor_in_a_container_looks_at_the_containers_cache(
    tmp_path: Path, version: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = MadeHost(tmp_path, version=version, own="/box")
    host.cgroup(".", limit=None, usage=2 * MIB)
    box = host.cgroup("box", limit=limit, usage=MIB)
    prefix = "" if version == 2 else "total_"
    with (box / "memory.stat").open("a") as stat:
        stat.write(f"{prefix}active_file 4096\n{prefix}workingset_refault_file 2\n")
    (host.proc / "vmstat").write_text("nr_active_file 100\nworkingset_refault_file 50\n")
    for name in ("memory_hierarchy", "host_memory", "machine_cache"):
        monkeypatch.setattr(
            donor_memory, name, functools.partial(getattr(memory, name), proc=host.proc)
        )
    source = donor_memory.HostMemorySource()
    source.read()
    cache = source.cache()
    assert cache is not None
    assert cache.refault_bytes == (50 if limit is None else 2) * 4096


def test_lines_that_are_no_counter_are_left_out() -> None:
    text = "a 1\nb -2\n c\t3 \n\nword x\nthree 1 2\nlast_one 18446744073709551615\nd 1.5\ne\n7\n"
    counters = {"a": 1, "b": -2, "c": 3, "last_one": (1 << 64) - 1}
    assert parse_key_values(text) == counters
