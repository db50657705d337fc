# SPDX-License-Identifier: Apache-2.0
"""Each comparison of `make bench`, with little of everything: it runs, its JSON is sane, and
nothing is left behind. No figure is judged. One shows in every run that a comparison can be made;
the others take minutes, for full runs."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from support.benchmarks import Runner, check_figures

from infiniswap.system import loop
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.system.userfault import far_refusal

pytestmark = [pytest.mark.requires_root, pytest.mark.requires_native, pytest.mark.timeout(900)]

LITTLE = (
    *("--rounds", "2", "--seconds", "0.1", "--donor-size", "16M"),
    *("--swap-size", "96M", "--swap-limit", "48M", "--swap-device", "128M"),
    *("--page-out-size", "96M", "--page-out-limit", "32M"),
    *("--idle-seconds", "0.5", "--device-size", "128M"),
    *("--size", "tiny", "--rows", "in-order"),
)
NEEDS_FAR = pytest.mark.skipif(
    far_refusal() is not None, reason=f"needs far memory: {far_refusal()}"
)


def samples(runner: Runner, name: str) -> dict[str, Any]:
    found = runner.results("peers", name, *LITTLE)
    check_figures(found)
    for side in found["samples"].values():
        assert {len(values) for values in side.values()} == {2}
    values: dict[str, Any] = found["samples"]
    return values


@pytest.mark.full
@pytest.mark.requires_tool("fio", "nbdkit", "cmake")
def test_donor(runner: Runner) -> None:
    assert set(samples(runner, "donor")) == {"infiniswap", "nbdkit memory"}


@pytest.mark.full
@pytest.mark.requires_tool("fio", "nbdkit", "cmake")
def test_engine(runner: Runner) -> None:
    assert {"infiniswap", "our engine on nbdkit", "ping-pong"} <= set(samples(runner, "engine"))


@pytest.mark.full
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("nbdfuse", "nbdkit", "cmake")
def test_swap(runner: Runner) -> None:
    found = samples(runner, "swap")
    assert {"infiniswap", "nbdfuse", "FUSE floor", "disk"} <= set(found)
    for side in found.values():
        assert min(side["faults"]) > 0


@pytest.mark.full
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
def test_seal(runner: Runner) -> None:
    assert set(samples(runner, "seal")) == {"sealed", "not sealed"}


@pytest.mark.full
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
def test_page_out(runner: Runner) -> None:
    found = samples(runner, "page-out")
    assert {"infiniswap", "FUSE floor", "disk"} <= set(found)
    for side in found.values():
        assert min(side["out_mb_per_s_1"] + side["out_mb_per_s_4"]) > 0


@pytest.mark.full
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
def test_zswap(runner: Runner) -> None:
    found = samples(runner, "zswap")
    assert max(found["infiniswap"]["shrunk_50"]) == 0
    assert 0 < min(found["infiniswap + zswap"]["shrunk_50"]) < 1


@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
def test_process(runner: Runner) -> None:
    assert min(samples(runner, "process")["infiniswap"]["threads"]) > 1


@pytest.mark.full
@NEEDS_FAR
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
def test_far(runner: Runner) -> None:
    found = runner.results("peers", "far", *LITTLE)
    check_figures(found)
    assert found["failed"] == ""
    sides = found["samples"]
    assert len(sides["in-order: no limit"]["elapsed_s"]) == 1
    for rival in ("disk", "infiniswap", "far memory", "far memory, no backup"):
        side = sides[f"in-order: {rival}"]
        assert {len(values) for values in side.values()} == {2}
        assert min(side["read_per_s"] + side["write_per_s"]) > 0
    assert min(sides["in-order: far memory"]["far_share"]) > 0.5


@pytest.mark.full
@NEEDS_FAR
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
@pytest.mark.parametrize("rival", ["disk", "far memory"])
def test_an_interrupted_job_with_far_memory_leaves_nothing_behind(
    runner: Runner, rival: str
) -> None:
    command = runner.command("peers", "far", *LITTLE)
    runner.interrupt(command, signal.SIGINT, lambda: None, begun=f"in-order, {rival},")
    assert not find_job_cgroups()


@pytest.mark.full
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_swap
@pytest.mark.requires_tool("nbdfuse", "nbdkit", "cmake")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_behind(runner: Runner, number: signal.Signals) -> None:
    numbers: list[int] = []

    def in_the_middle() -> None:
        time.sleep(0.3)  # somewhere in a measurement; where must not matter
        numbers.extend(int(path.name[4:]) for path in runner.work.glob("*/loop[0-9]*"))

    runner.interrupt(runner.command("peers", "swap", *LITTLE), number, in_the_middle)
    assert numbers
    for device in filter(None, map(loop.loop_device, numbers)):
        # Somebody else may have taken the number; a file system of ours has lost its path.
        assert str(runner.work) not in device.backing
        assert device.backing not in ("/disk", "/nbd")
