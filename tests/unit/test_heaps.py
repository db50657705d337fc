# SPDX-License-Identifier: Apache-2.0
"""Jobs whose runtime sizes its heap by the limit: when `run` and `plan` say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.devices.device_status import device_status

from infiniswap.device.jobs import closing, usage
from infiniswap.device.jobs import summary as summaries
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.heaps import MemoryOptions
from infiniswap.device.jobs.job import JobResult
from infiniswap.planning.watch import WholeWatch
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.units import MIB

LOCAL = 300 * MIB
PID = 4711
HINT = "node sizes its heap by the memory limit"


class Host:
    """A job's cgroup of version 1, and its process in a proc file system of its own."""

    def __init__(self, path: Path) -> None:
        self.cgroup, self.proc = path / "cgroup", path / "proc"
        self.process = self.proc / str(PID)
        self.process.mkdir(parents=True)
        self.cgroup.mkdir()
        (self.cgroup / "cgroup.procs").write_text(f"{PID}\n")
        (self.cgroup / "memory.oom_control").write_text("oom_kill 0\n")
        (self.cgroup / "memory.limit_in_bytes").write_text(f"{LOCAL}\n")
        self.sampler = usage.Sampler(MemoryCgroup(self.cgroup, 1), "/dev/x", tuple, proc=self.proc)

    def become(self, executable: str, *words: str, environ: str = "") -> None:
        """The process executes a program."""
        link = self.process / "exe"
        link.unlink(missing_ok=True)
        link.symlink_to(executable)
        (self.process / "cmdline").write_text("\0".join((executable, *words, "")))
        (self.process / "environ").write_text(environ)

    def use(self, anon: int, swapped: int = 0) -> None:
        """The job uses so many MiB."""
        (self.cgroup / "memory.stat").write_text(
            f"total_rss {anon * MIB}\ntotal_swap {swapped * MIB}\n"
        )
        for name in ("memory.usage_in_bytes", "memory.max_usage_in_bytes"):
            (self.cgroup / name).write_text(f"{anon * MIB}\n")
        self.sampler.sample()

    def ended(self, exit_code: int) -> summaries.Summary:
        """The summary of the job."""
        status = device_status()
        result, account = JobResult(exit_code, 1.0), Account(status)
        return summaries.summarize("sh", result, self.sampler, LOCAL, account, status, shared=False)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_run_and_plan_name_the_option_of_a_full_heap(host: Host) -> None:
    host.become("/usr/bin/sh")
    host.use(1)
    host.become("/usr/bin/node", "map.js")
    host.use(240)
    summary = host.ended(134)
    said = closing.describe(summary)[-1]
    assert HINT in said
    assert "NODE_OPTIONS=--max-old-space-size" in said
    watch = WholeWatch()
    watch.ended(summary)
    assert said.removeprefix("advice: ") in watch.problem


def test_java_fails_with_a_quarter_of_its_limit(host: Host) -> None:
    host.become("/usr/lib/jvm/bin/java", "-jar", "x.jar")
    host.use(80)
    assert "JAVA_TOOL_OPTIONS=-Xmx" in closing.describe(host.ended(1))[-1]


def test_a_runtime_that_aborts_with_a_full_heap_has_paged(host: Host) -> None:
    """With a small limit Node.js pages out most of it before its heap is full."""
    host.become("/usr/bin/node", "heap.js")
    host.use(240, 200)
    assert HINT in "\n".join(closing.describe(host.ended(134)))


def test_net_is_told_of_its_own_variable(host: Host) -> None:
    host.become("/usr/lib/dotnet/dotnet", "x.dll")
    host.use(240)
    assert "DOTNET_GCHeapHardLimit=0x" in closing.describe(host.ended(134))[-1]


@pytest.mark.parametrize(
    ("words", "environ"),
    [(("--max-old-space-size=900", "x.js"), ""), ((), "A=b\0NODE_OPTIONS=--max_old_space_size=9")],
)
def test_a_heap_of_a_chosen_size_is_not_blamed(
    host: Host, words: tuple[str, ...], environ: str
) -> None:
    host.become("/usr/bin/node", *words, environ=environ)
    host.use(240)
    assert host.ended(134).heap_by_limit == ""


@pytest.mark.parametrize(
    ("anon", "swapped", "exit_code"),
    [(240, 0, 0), (40, 0, 134), (200, 400, 1)],
    ids=["it went well", "it failed early", "it paged"],
)
def test_a_heap_that_was_not_full_is_not_blamed(
    host: Host, anon: int, swapped: int, exit_code: int
) -> None:
    host.become("/usr/bin/node", "map.js")
    host.use(anon, swapped)
    assert HINT not in "\n".join(closing.describe(host.ended(exit_code)))


@pytest.mark.parametrize(
    ("words", "environ", "given"),
    [
        (("/usr/bin/sort", "-S", "600M", "x"), "", {"sort -S"}),
        (("/usr/bin/sort", "--buffer-size=1G"), "", {"sort --buffer-size"}),
        (("/usr/bin/sort", "x"), "LESS=-S\0", set()),
        (("/usr/bin/java", "-jar", "x.jar"), "JAVA_TOOL_OPTIONS=-ea -Xmx4g\0", {"java -Xmx"}),
        (
            ("/usr/bin/dotnet", "x"),
            "DOTNET_GCHeapHardLimit=0x1000\0",
            {"dotnet DOTNET_GCHeapHardLimit"},
        ),
        (("/usr/bin/python3", "-S"), "", set()),
    ],
)
def test_an_option_that_sets_the_memory_is_found(
    host: Host, words: tuple[str, ...], environ: str, given: set[str]
) -> None:
    host.become(*words, environ=environ)
    options = MemoryOptions(host.proc)
    options.look([PID])
    assert options.given == given
