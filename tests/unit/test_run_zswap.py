# SPDX-License-Identifier: Apache-2.0
"""What `run` tells of zswap, on made-up cgroups and counters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.device.jobs import compressed
from infiniswap.device.jobs.compressed import Meter, ZswapUse
from infiniswap.system import zswap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.units import MIB

PAGES = MIB // 4096


class Kernel:
    """Its counters, in files: for a job's cgroup of version 2, or for the whole host."""

    def __init__(self, root: Path, version: int) -> None:
        self.root = root
        self.version = version
        self.cgroup = MemoryCgroup(root / "job", version)
        self.cgroup.path.mkdir()

    def tell(
        self, stored: int, loaded: int, held: int = 0, pool: int = 0, written: int | None = None
    ) -> None:
        """Everything in MiB; `written` is not counted by older kernels."""
        counters = f"zswpout {stored * PAGES}\nzswpin {loaded * PAGES}\n"
        if written is not None:
            counters += f"zswpwb {written * PAGES}\n"
        if self.version == 2:
            text = f"anon 0\nzswapped {held * MIB}\nzswap {pool * MIB}\n{counters}"
            (self.cgroup.path / "memory.stat").write_text(text)
        else:
            (self.root / "vmstat").write_text(f"pswpin 7\n{counters}")
            text = f"Zswap: {pool * 1024} kB\nZswapped: {held * 1024} kB\n"
            (self.root / "meminfo").write_text(text)

    def meter(self) -> Meter:
        return Meter(self.cgroup, proc=self.root)


@pytest.fixture(params=[1, 2])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return Kernel(tmp_path, request.param)


def test_only_what_zswap_did_since_the_start_counts(kernel: Kernel) -> None:
    kernel.tell(100, 60, held=40, pool=20, written=3)
    meter = kernel.meter()
    kernel.tell(300, 160, held=128, pool=48, written=8)
    meter.sample()
    kernel.tell(310, 290, held=4, pool=1, written=9)
    meter.sample()
    use = meter.use()
    assert use == ZswapUse(
        whose="job" if kernel.version == 2 else "host",
        stored_bytes=210 * MIB,
        loaded_bytes=230 * MIB,
        written_bytes=6 * MIB,
        pool_peak_bytes=48 * MIB,
        shrunk_share=0.375,
    )


def test_zswap_switched_off_meanwhile_keeps_what_it_did(kernel: Kernel) -> None:
    kernel.tell(0, 0)
    meter = kernel.meter()
    kernel.tell(50, 10, held=40, pool=20)
    meter.sample()
    for loaded in (30, 50):  # off: it takes nothing more, and gives back what it holds
        kernel.tell(50, loaded, held=50 - loaded, pool=(50 - loaded) // 2)
        meter.sample()
    use = meter.use()
    assert use is not None
    assert (use.stored_bytes, use.loaded_bytes) == (50 * MIB, 50 * MIB)
    assert (use.pool_peak_bytes, use.written_bytes) == (20 * MIB, None)


def test_nothing_is_said_where_zswap_did_nothing(kernel: Kernel) -> None:
    kernel.tell(100, 60, held=40, pool=20)
    meter = kernel.meter()
    meter.sample()
    assert meter.use() is None


def test_nothing_is_said_where_the_kernel_does_not_count(kernel: Kernel) -> None:
    meter = kernel.meter()
    meter.sample()
    assert meter.use() is None
    (kernel.cgroup.path / "memory.stat").write_text("anon 1\n")
    (kernel.root / "vmstat").write_text("pswpin 1\n")
    meter.sample()
    assert meter.use() is None


def test_a_cgroup_that_has_gone_keeps_the_last_figures(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    kernel.tell(0, 0)
    meter = kernel.meter()
    kernel.tell(5, 3)
    meter.sample()
    (kernel.cgroup.path / "memory.stat").unlink()
    meter.sample()
    use = meter.use()
    assert use is not None
    assert use.stored_bytes == 5 * MIB


USE = ZswapUse("job", 300 * MIB, 200 * MIB, 10 * MIB, 64 * MIB, 0.45)


def test_the_hosts_figures_are_told_from_a_jobs_own() -> None:
    assert compressed.describe(USE) == "zswap took 300 MiB, gave back 200 MiB"
    text = compressed.describe(dataclasses.replace(USE, whose="host"))
    assert text == "zswap (for all programs of this host) took 300 MiB, gave back 200 MiB"


def test_a_pool_that_no_limit_counts_is_not_said_to_slow_the_job_down() -> None:
    little = dataclasses.replace(USE, shrunk_share=0.9)
    assert "make a job slower with zswap" in compressed.harm(little)
    text = compressed.harm(dataclasses.replace(little, whose="host"))
    assert "slower" not in text
    assert "would help a job more as --local. " in text
    assert "docs/when-to-use.md" in text


@given(st.none() | st.floats(0.0, 1.0))
def test_only_pages_that_shrink_too_little_are_warned_of(share: float | None) -> None:
    text = compressed.harm(dataclasses.replace(USE, shrunk_share=share))
    hardly = share is not None and share > zswap.HELPS_SHARE_MAX
    assert bool(text) == hardly
