# SPDX-License-Identifier: Apache-2.0
"""The swap device of `infiniswap run`: made, shared, taken away, whoever dies in whatever order."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.devices.cluster import (
    NEEDS_SWAP,
    SLAB,
    WAIT_S,
    Cluster,
    Device,
    process_state,
    run,
    until,
    wait_ended,
)
from support.jobs.runs import Runner, StartTerminal, other_area, ready, touch
from support.machine.small_disk import small_disk

from infiniswap.device.jobs import beside
from infiniswap.errors import InfiniswapError
from infiniswap.system import loop, mounts, swap
from infiniswap.system.cgroup import create_memory_cgroup
from infiniswap.units import MIB

pytestmark = NEEDS_SWAP

SIZE = ("--size", "64M")
FOREVER = 1 << 30


def waiting(runner: Runner, options: tuple[str, ...] = SIZE) -> subprocess.Popen[bytes]:
    """A run whose job waits for a line and then ends with 5."""
    process = runner.popen(
        "sh", "-c", "echo ready; read line; exit 5", options=options, stdin=subprocess.PIPE
    )
    ready(process)
    return process


def finish(process: subprocess.Popen[bytes]) -> str:
    """Lets such a job end; returns what `run` said."""
    _, stderr = process.communicate(b"\n", timeout=2 * WAIT_S)
    assert process.returncode == 5, stderr.decode()
    return stderr.decode()


def area_of(runner: Runner) -> swap.SwapArea:
    """The area of the one run."""
    (device,) = runner.cluster.loops()
    area = swap.find_area(device.path)
    assert area is not None
    return area


def need_no_other_swap() -> None:
    if swap.active_areas():
        pytest.skip("needs a host without active swap space")


# --------------------------------------------------------------------- in good order


def test_a_run_makes_its_device_and_takes_it_away(runner: Runner) -> None:
    process = waiting(runner)
    status = runner.status
    assert status["ephemeral"] is True
    assert status["runs"] == [process.pid]
    assert status["size_bytes"] == 64 * MIB
    assert area_of(runner).priority > max(
        (a.priority for a in swap.active_areas() if a != area_of(runner)), default=-2
    )
    said = finish(process)
    # At once, not later: the next command finds the host as it was.
    assert runner.leftovers() == []
    assert status["path"] in said


def lendable_bytes(cluster: Cluster) -> int:
    """What the donors would lend now."""
    status = json.loads(cluster.ok("status", "--json", "--donors", cluster.addresses))
    return sum(int(row["status"]["pool"]["can_map"]) * SLAB for row in status["donors"])


def test_the_size_is_chosen_and_printed(runner: Runner) -> None:
    done = runner("true", local="16M")
    assert "device size 64.0 MiB: 4 x --local" in done.stderr.decode()
    # Once what the last device had there is free again.
    until(lambda: lendable_bytes(runner.cluster) == 512 * MIB, "two whole pools")
    done = runner("true", local="512M")
    assert re.search("device size 512 MiB: what the donors can lend", done.stderr.decode())


def test_a_job_three_times_its_limit_gets_every_byte_back(runner: Runner) -> None:
    summary = runner.summary(*touch(72, 2), options=("--size", "96M"), local="24M")
    assert summary["anon_peak_bytes"] >= 72 * MIB
    assert summary["local_peak_bytes"] <= 24 * MIB
    assert summary["page_in_remote_bytes"] > 0
    assert summary["shared"] is False


# ------------------------------------------------------------------------ sharing


def run_device(runner: Runner, name: str) -> Device:
    """The device of one of several runs."""
    return Device(runner.cluster, name)


def areas_of(runner: Runner) -> dict[str, swap.SwapArea]:
    """Every run's area by the name of its device."""
    found = {}
    for name in runner.cluster.names():
        with contextlib.suppress(InfiniswapError):
            if path := run_device(runner, name).status["path"]:
                found[name] = swap.find_area(Path(path))
    return {name: area for name, area in found.items() if area is not None}


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_second_run_has_the_room_that_it_asked_for_in_an_area_beside_the_first(
    runner: Runner, first_ends_first: bool
) -> None:
    first = waiting(runner)
    second = waiting(runner, options=("--size", "48M"))
    pids = {name: run_device(runner, name).status["runs"] for name in runner.cluster.names()}
    assert pids == {"run": [first.pid], "run-2": [second.pid]}
    areas = areas_of(runner)
    assert {name: round(area.size_bytes / MIB) for name, area in areas.items()} == {
        "run": 64,
        "run-2": 48,
    }
    assert areas["run"].priority == areas["run-2"].priority
    time.sleep(2 * beside._LOOK_S)  # each has looked for the other meanwhile
    order = [(first, "run"), (second, "run-2")]
    (ends, gone), (stays, left) = order if first_ends_first else reversed(order)
    text = finish(ends)
    assert f"(swap areas shared with other runs: {areas[left].path})" in text
    # In the background if the host has put a page there, which may be anybody's.
    until(lambda: runner.cluster.names() == [left], "its device to go")
    text = finish(stays)
    assert f"(swap areas shared with other runs: {areas[gone].path})" in text
    runner.nothing_left()


def test_the_summary_of_a_run_that_was_alone_says_nothing_of_shared_areas(runner: Runner) -> None:
    assert "shared" not in finish(waiting(runner))
    assert runner.summary("true", options=SIZE)["shared_areas"] == []


def test_a_job_pages_to_the_areas_of_both_runs_and_one_that_ends_moves_what_others_have_there(
    runner: Runner,
) -> None:
    room = ("--size", "192M")
    first = runner.popen(*touch(72, FOREVER), options=room, local="24M")
    ready(first, b"round 0\n")
    for _ in range(2):  # each ends while the first pages
        summary = runner.summary(*touch(48, 2), options=room, local="24M")
        assert summary["shared_areas"] == [runner.status["path"]]
        assert summary["shared"] is True
        until(lambda: runner.cluster.names() == ["run"], "the area of the one that has ended to go")
        for _ in range(2):  # each verifies every page
            assert first.stdout is not None
            assert first.stdout.readline().startswith(b"round "), first.communicate()[1]
    first.terminate()
    _, stderr = first.communicate(timeout=2 * WAIT_S)
    assert first.returncode == 128 + signal.SIGTERM
    assert "swap areas shared with other runs" in stderr.decode()
    runner.nothing_left()


@pytest.mark.parametrize("first_ends_first", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_area_with_pages_that_fit_nowhere_else_stays_until_their_run_ends(
    runner: Runner, first_ends_first: bool
) -> None:
    need_no_other_swap()
    # More than fits into its own area: some of it is in the other's, whatever the kernel chooses.
    large = ("sh", "-c", 'echo ready; read go; exec "$@"', "sh", *touch(104, FOREVER))
    started = []
    for ends_first in (first_ends_first, not first_ends_first):
        started.append(
            waiting(runner)
            if ends_first
            else runner.popen(*large, options=SIZE, local="24M", stdin=subprocess.PIPE)
        )
        if not ends_first:
            ready(started[-1])
    names, order = ("run", "run-2"), (0, 1) if first_ends_first else (1, 0)
    ends, stays = (started[number] for number in order)
    assert stays.stdin is not None
    stays.stdin.write(b"go\n")
    stays.stdin.flush()
    ready(stays, b"round 1\n")
    text = finish(ends)
    left = names[order[0]]
    assert f"of other commands lie in the swap device {left}: it is removed in the back" in text
    ready(stays, b"round 2\n")
    assert runner.cluster.names() == ["run", "run-2"]
    assert run_device(runner, left).status["runs"] == []
    stays.terminate()
    stays.communicate(timeout=2 * WAIT_S)
    assert stays.returncode == 128 + signal.SIGTERM
    runner.nothing_left()


def test_a_second_run_goes_on_when_the_first_is_killed(runner: Runner) -> None:
    first = waiting(runner)
    second = runner.popen(*touch(48, FOREVER), options=SIZE, local="24M")
    ready(second, b"round 0\n")
    first.kill()
    first.wait(WAIT_S)
    until(
        lambda: "run" not in runner.cluster.names() or not runner.status["runs"],
        "the death to be noticed",
    )
    for number in (1, 2, 3):  # each verifies every page
        ready(second, b"round %d\n" % number)
    second.terminate()
    second.communicate(timeout=2 * WAIT_S)
    assert second.returncode == 128 + signal.SIGTERM
    runner.nothing_left()


def test_runs_that_start_at_once_have_an_area_each(runner: Runner) -> None:
    script = "echo ready; read line; exit 5"
    started = [
        runner.popen("sh", "-c", script, options=SIZE, stdin=subprocess.PIPE) for _ in range(3)
    ]
    for process in started:
        ready(process)
    names = runner.cluster.names()
    assert names == ["run", "run-2", "run-3"]
    pids = [pid for name in names for pid in run_device(runner, name).status["runs"]]
    assert sorted(pids) == sorted(process.pid for process in started)
    assert len({area.priority for area in areas_of(runner).values()}) == 1
    for process in started:
        finish(process)
    runner.nothing_left()


def test_a_second_run_with_other_options_is_refused_and_the_first_one_named(
    runner: Runner,
) -> None:
    first = waiting(runner)
    done = runner("echo", "ran", options=("--donors", "127.0.0.1:9"))
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (9, b""), text
    assert "--donors differs from that of the `infiniswap run` that is running" in text
    assert f"(process {first.pid})" in text
    assert runner.cluster.names() == ["run"]
    finish(first)
    assert runner.leftovers() == []


def test_a_run_that_comes_while_the_device_goes_gets_one(runner: Runner) -> None:
    """Again and again, as the moments differ."""
    for _ in range(3):
        first = waiting(runner)
        assert first.stdin is not None
        first.stdin.write(b"\n")
        first.stdin.flush()
        second = waiting(runner)
        first.communicate(timeout=2 * WAIT_S)
        assert first.returncode == 5
        finish(second)


# ------------------------------------------------------------------ declared devices


def test_a_declared_device_stays(runner: Runner) -> None:
    device = runner.cluster.start("--swap", size="64M")
    done = runner.popen("sh", "-c", "exit 3", options=("--device", device.name))
    done.communicate(timeout=WAIT_S)
    assert done.returncode == 3
    killed = runner.popen(
        "sh", "-c", "echo ready; exec sleep 1000", options=("--device", device.name)
    )
    ready(killed)
    cgroup = runner.cgroup(killed)
    stop = runner.cluster.cli("device", "stop", device.name)
    assert stop.returncode == 9
    assert f"process {killed.pid}" in stop.stderr
    killed.kill()
    until(lambda: not cgroup.path.exists(), "the job's cgroup to go")
    until(lambda: device.status["runs"] == [], "the death to be noticed")
    assert device.status["swap"]["active"]
    device.remove()


def test_a_device_that_cannot_be_used_is_a_clear_error(runner: Runner) -> None:
    def refused(name: str, *more: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "infiniswap", "run", "--local", "32M", "--device", name]
        done = runner.cluster.cli(*argv[3:], *more, "--", "echo", "ran")
        assert "ran" not in done.stdout
        return done.returncode, done.stderr

    device = runner.cluster.start(size="32M")
    code, text = refused(device.name)
    assert (code, "not in use as swap space" in text) == (2, True)
    device.remove()
    code, text = refused("nothing")
    assert (code, "no device named nothing is running" in text) == (11, True)
    code, text = refused("nothing", "--donors", "127.0.0.1")
    assert (code, "--donors cannot be used together with --device" in text) == (2, True)


# ------------------------------------------------------------------------- deaths


def test_a_killed_run_leaves_nothing(runner: Runner) -> None:
    script = 'setsid sh -c "sleep 1000 & sleep 1000" & exec "$@"'
    process = runner.popen("sh", "-c", script, "sh", *touch(48, FOREVER), options=SIZE, local="24M")
    ready(process, b"round 0\n")
    cgroup = runner.cgroup(process)
    pids = until(lambda: (found := cgroup.pids()) and len(found) >= 4 and found, "the job's others")
    process.kill()
    runner.nothing_left()
    assert not cgroup.path.exists()
    until(lambda: not any(alive(pid) for pid in pids), "the job's processes to end")


def alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    return process_state(pid) not in ("", "Z", "X")


def test_a_run_killed_together_with_its_job_leaves_nothing(runner: Runner) -> None:
    """As a machine-wide `kill -9 -1` or an impatient user does."""
    process = runner.popen(
        "sh", "-c", "echo ready; exec sleep 1000", options=SIZE, start_new_session=True
    )
    ready(process)
    os.killpg(process.pid, signal.SIGKILL)
    runner.nothing_left()


def run_dir(runner: Runner) -> Path:
    return runner.cluster.run_dir / "run"


MOMENTS: dict[str, Callable[[Runner], object]] = {
    "its process exists": lambda runner: (run_dir(runner) / "log").exists(),
    "it has its lock": lambda runner: (run_dir(runner) / "lock").exists(),
    "it has a backup": lambda runner: (runner.cluster.backup_dir / "run.backup").exists(),
    "it is recorded": lambda runner: (run_dir(runner) / "device.json").exists(),
    "it is mounted": lambda runner: any(
        mount.mount_point.startswith(str(runner.cluster.root)) for mount in mounts.mounts()
    ),
    "it has a loop device": lambda runner: runner.cluster.loops(),
    "it swaps": lambda runner: any(
        swap.find_area(device.path) for device in runner.cluster.loops()
    ),
    "it answers": lambda runner: (run_dir(runner) / "control.sock").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_during_the_start_of_its_device_leaves_nothing(
    runner: Runner, moment: str
) -> None:
    process = runner.popen("sleep", "1000", options=SIZE)
    until(lambda: MOMENTS[moment](runner), moment)
    process.kill()
    process.wait(WAIT_S)
    runner.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_interrupted_during_the_start_of_its_device_undoes_it_at_once(
    runner: Runner, number: signal.Signals
) -> None:
    process = runner.popen("echo", "ran", options=SIZE)
    until(lambda: MOMENTS["it is recorded"](runner), "the device's record")
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=2 * WAIT_S)
    # Where it came too late for that, the job got it, or had ended.
    assert process.returncode == 128 + number or stdout == b"ran\n", stderr.decode()
    assert "Traceback" not in stderr.decode()
    assert runner.leftovers() == []


@pytest.mark.requires_tool("bash")
def test_a_closed_window_with_a_shell_leaves_nothing(
    runner: Runner, terminal: StartTerminal
) -> None:
    window = terminal(["bash", "--norc", "--noprofile", "-i"], runner, PS1="shell> ")
    window.expect("shell> ")
    argv = runner.argv("sh", "-c", 'echo rea""dy $$; sleep 1000', options=("--size", "64M"))
    window.type(" ".join(f"'{part}'" for part in argv) + "\n")
    pid = int(window.line("ready "))
    window.hang_up()
    wait_ended(pid)
    window.wait()
    runner.nothing_left()


def test_a_window_closed_during_the_start_of_the_device_leaves_nothing(
    runner: Runner, terminal: StartTerminal
) -> None:
    window = terminal(runner.argv("sleep", "1000", options=("--size", "64M")), runner)
    until(lambda: (runner.cluster.run_dir / "run" / "lock").exists(), "the device's start")
    window.hang_up()
    code = window.wait()
    assert code in (128 + signal.SIGHUP, -signal.SIGHUP)
    runner.nothing_left()


def test_a_device_that_dies_ends_the_job_with_a_clear_message(runner: Runner) -> None:
    process = runner.popen(*touch(48, FOREVER), options=SIZE, local="24M")
    ready(process, b"round 0\n")
    pid = int(runner.status["pid"])
    os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=2 * WAIT_S)
    # By us, or by the kernel because a page could not be read.
    assert process.returncode in (128 + signal.SIGKILL, 128 + signal.SIGBUS)
    assert "the process of the swap device has died" in stderr.decode()
    assert "cleaned up" not in stderr.decode()
    assert runner.leftovers() == []


@pytest.mark.parametrize("name", ["run", pytest.param("run-2", marks=pytest.mark.full)])
def test_a_device_that_dies_ends_every_run_that_may_have_pages_there(
    runner: Runner, name: str
) -> None:
    started = []
    for _ in range(2):
        started.append(runner.popen(*touch(32, FOREVER), options=SIZE, local="24M"))
        ready(started[-1], b"round 0\n")
    own = started[name == "run-2"]
    for process in started:
        ready(process, b"round 2\n")
    os.kill(int(run_device(runner, name).status["pid"]), signal.SIGKILL)
    for process in started:
        _, stderr = process.communicate(timeout=2 * WAIT_S)
        text = stderr.decode()
        assert process.returncode in (128 + signal.SIGKILL, 128 + signal.SIGBUS), text
        assert "the process of the swap device" in text
        assert "has died" in text
        assert ("another run" in text.rpartition("the process of")[2]) == (process is not own)
    runner.nothing_left()


def test_a_run_clears_what_a_killed_device_and_its_killed_run_left(runner: Runner) -> None:
    process = runner.popen(*touch(48, FOREVER), options=SIZE, local="24M")
    ready(process, b"round 0\n")
    cgroup = runner.cgroup(process)
    pid = int(runner.status["pid"])
    os.kill(pid, signal.SIGSTOP)  # it must not clean up first
    process.kill()
    process.wait(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    assert runner.leftovers()
    finish(waiting(runner))
    assert not cgroup.path.exists()
    assert runner.leftovers() == []


def test_a_device_stopped_in_order_under_a_run_lets_the_job_go_on(runner: Runner) -> None:
    process = waiting(runner)
    pid = int(runner.status["pid"])
    os.kill(pid, signal.SIGTERM)
    wait_ended(pid)
    assert "was stopped while the command ran" in finish(process)
    assert runner.leftovers() == []


# ------------------------------------------------------------------- out of memory


def test_a_full_device_is_named_as_the_limit_that_ran_out(runner: Runner) -> None:
    need_no_other_swap()
    path = runner.cluster.root / "summary.json"
    options = ("--size", "24M", "--summary-json", str(path))
    done = runner(*touch(160), options=options, local="24M")
    assert done.returncode == 128 + signal.SIGKILL
    text = done.stderr.decode()
    assert "the kernel killed 1 process of the job" in text
    assert "the whole swap device of 24.0 MiB. Give a larger --size." in text
    assert '"limit": "device"' in path.read_text()
    path.unlink()


LOCKED = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mlockall(3) == 0
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), 4096):
    memory[at] = 1
"""


def test_memory_that_cannot_be_paged_out_is_told_from_a_full_device(runner: Runner) -> None:
    done = runner(sys.executable, "-c", LOCKED, options=("--size", "128M"), local="32M")
    assert done.returncode == 128 + signal.SIGKILL
    text = done.stderr.decode()
    assert "local memory of 32.0 MiB (--local) ran out" in text
    assert "Give a larger --local." in text


def test_the_killed_child_of_a_job_that_goes_on_is_told(runner: Runner) -> None:
    script = '"$@"; echo "child: $?"; exit 3'
    command = ("sh", "-c", script, "sh", sys.executable, "-c", LOCKED)
    done = runner(*command, options=("--size", "128M"), local="32M")
    assert (done.returncode, done.stdout) == (3, b"child: 137\n")
    assert "(--local) ran out" in done.stderr.decode()


def test_a_swapoff_by_somebody_else_is_named_as_the_cause(runner: Runner) -> None:
    need_no_other_swap()
    script = 'echo ready; read line; exec "$@"'
    process = runner.popen(
        "sh", "-c", script, "sh", *touch(96), options=SIZE, stdin=subprocess.PIPE, local="24M"
    )
    ready(process)
    area = area_of(runner)
    swap.swapoff(Path(area.path), timeout_s=WAIT_S)
    _, stderr = process.communicate(b"\n", timeout=2 * WAIT_S)
    assert process.returncode == 128 + signal.SIGKILL
    text = stderr.decode()
    assert f"somebody else took the swap area {area.path} out of use (swapoff)" in text
    assert "Give a larger" not in text
    assert "cannot be removed" not in text


def test_a_kill_by_another_is_told_from_one_for_want_of_memory(runner: Runner) -> None:
    process = waiting(runner)
    for pid in runner.cgroup(process).pids():
        os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert "the kernel killed nothing for want of memory" in stderr.decode()


def test_a_backup_that_refuses_writes_is_named_at_once(runner: Runner, cluster: Cluster) -> None:
    """Its file system is full, and its blocks are gone. The job ends once there is room again."""
    with small_disk(cluster.root, 200) as point, contextlib.ExitStack() as stack:
        file, fill, said = point / "backup", point / "fill", cluster.root / "said"
        run("fallocate", "--length", "64M", file)
        disk = loop.attach(file)
        stack.callback(loop.detach, disk)
        script = 'echo ready; read line; "$@"; exit 5'
        process = runner.popen(
            *("sh", "-c", script, "sh", *touch(56, 2)),
            options=("--size", "64M", "--backup", str(disk.path)),
            stdin=subprocess.PIPE,
            stderr=stack.enter_context(said.open("w")),
            local="24M",
        )
        ready(process)
        run("fallocate", "--punch-hole", "--offset", "0", "--length", "64M", file)
        with contextlib.suppress(OSError), fill.open("wb", buffering=0) as filler:
            while filler.write(bytes(MIB)):
                pass
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        alarm = f"warning: the backup {disk.path} refuses writes: "
        until(lambda: alarm in said.read_text(), "the alarm")
        fill.unlink()
        process.communicate(timeout=2 * WAIT_S)
        # Until then the kernel may have found nothing that it could page out.
        if process.returncode != 5:
            assert "the swap device did not take what had to be paged out" in said.read_text()
        assert f"device reported: the backup {disk.path} refuses" in said.read_text()
        assert "larger" not in said.read_text()


# ------------------------------------------------------------------ other swap areas


def test_other_swap_areas_are_named_and_used_last(runner: Runner, cluster: Cluster) -> None:
    with other_area(cluster.root, mib=64, priority=300):
        (other,) = [area for area in swap.active_areas() if area.priority == 300]
        process = waiting(runner)
        assert area_of(runner).priority > 300
        said = finish(process)
        free = f"{other.path} (priority 300, 64.0 MiB free)"
        assert f"{free} is used when ours is full, and keeps pages unsealed" in said
        # Ours is too small for this one, so the rest of it goes there.
        options = ("--size", "16M")
        summary = runner.summary(*touch(72, 1), options=options, local="24M")
        assert summary["other_swap_bytes"] >= 8 * MIB
        done = runner(*touch(72, 1), options=options, local="24M")
        assert "went to other swap areas" in done.stderr.decode()
        assert re.search(rf"{other.path} \([0-9.]+ MiB, not sealed\)", done.stderr.decode())
        # Still as it was, and nothing of it is ours to touch.
        (after,) = [area for area in swap.active_areas() if area.path == other.path]
        assert (after.priority, after.size_bytes) == (300, other.size_bytes)


def test_what_another_program_has_swapped_out_delays_the_end_and_is_not_lost(
    runner: Runner, cluster: Cluster
) -> None:
    """It fits nowhere else: the device stays until that program lets go, and says so."""
    need_no_other_swap()
    process = waiting(runner)
    other = create_memory_cgroup(f"isw-test-{secrets.token_hex(4)}", 24 * MIB)
    script = 'read go; exec "$@"'
    program = subprocess.Popen(
        ["sh", "-c", script, "sh", *touch(40, FOREVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        other.add(program.pid)
        assert program.stdin is not None
        program.stdin.write(b"\n")
        program.stdin.flush()
        ready(program, b"round 0\n")
        said = finish(process)
        area = area_of(runner)
        assert f"{area.path} (64.0 MiB" in said
        assert "cannot be removed yet" in said
        assert other.name in said
        # What remains, who keeps serving it, and where to look.
        assert f"its process (pid {runner.status['pid']}) keeps serving" in said
        assert "tries to remove it at least every 15 s" in said
        assert "`infiniswap device show run`" in said
        assert area_of(runner).used_bytes > 8 * MIB
        assert runner.status["runs"] == []
        # The next one has an area beside it.
        finish(waiting(runner))
        assert program.poll() is None
        other.set_limit(256 * MIB)
        runner.nothing_left()
        # It goes on, with every byte.
        ready(program, b"round 1\n")
        assert program.poll() is None
    finally:
        program.kill()
        program.communicate()
        other.kill()
        other.remove()


# --------------------------------------------------- what goes wrong while the job runs


@pytest.mark.requires_tool("setsid")
def test_a_donor_that_goes_and_comes_back_is_told_when_it_happens(
    cluster: Cluster, terminal: StartTerminal
) -> None:
    donor = cluster.donor()
    runner = Runner(cluster)
    window = terminal(runner.argv(*touch(56, FOREVER), options=SIZE), runner)
    window.expect("from donors")
    donor.end(signal.SIGKILL)
    window.expect(f"infiniswap: donor {donor.address}")
    window.expect("The pages that it held are read from the local disk.\r\n")
    donor = cluster.successor(donor)
    window.expect("is back and holds pages again\r\n")
    window.type("\x03")
    window.wait()
    assert window.text.count("The pages that it held") == 1
    assert window.text.count("is back and holds pages again") == 1
    assert f"infiniswap: advice: donors gone meanwhile: {donor.address} (" in window.text
    assert "; from the disk " in window.text


# ------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--donors", "127.0.0.1:1,127.0.0.1:2"), 6, "none of the donors can be used"),
        (("--donors", "127.0.0.1:1", "--size", "64M"), 6, "127.0.0.1:1"),
        (("--slab", "16M", "--size", "64M"), 7, "slab"),
        (("--backup", "none", "--size", "64M"), 2, "--allow-data-loss"),
        (("--backup", "/proc/nothing/here", "--size", "64M"), 8, "/proc/nothing"),
        (("--frontend", "nbd-socket", "--size", "64M"), 2, "nbd-socket"),
        (("--transport", "rdma", "--size", "64M"), 5, "RDMA"),
        (("--secret-file", "/no/such/secret", "--size", "64M"), 3, "/no/such/secret"),
        (("--config", "/no/such/file"), 3, "/no/such/file"),
    ],
)
def test_a_mistake_is_one_clear_paragraph_and_leaves_nothing(
    runner: Runner, options: tuple[str, ...], code: int, text: str
) -> None:
    done = runner("echo", "ran", options=options)
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert text in said
    assert said.startswith("infiniswap: ")
    assert done.stdout == b""
    assert runner.leftovers() == []


def test_no_donor_at_all_is_an_error_that_says_how_to_name_one(cluster: Cluster) -> None:
    for options in ((), SIZE):
        done = cluster.cli("run", "--local", "32M", *options, "--", "echo", "ran")
        assert (done.returncode, done.stdout) == (6, "")
        assert "--donors" in done.stderr
    assert cluster.leftovers() == []


def test_a_command_line_without_a_command_is_an_error(cluster: Cluster) -> None:
    for rest in ((), ("--",)):
        done = cluster.cli("run", "--local", "32M", *rest)
        assert done.returncode == 2
        assert "there is no command to run" in done.stderr
    assert cluster.cli("run", "--local", "8M", "true").returncode == 2
    assert cluster.cli("run", "true").returncode == 2


@pytest.mark.requires_tool("unshare")
def test_without_root_the_error_names_sudo(cluster: Cluster) -> None:
    # In a user namespace without a mapping we are nobody, and can still read the checkout.
    done = subprocess.run(
        ["unshare", "--user", *Runner(cluster).argv("echo", "ran")],
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "sudo infiniswap run --local 32M" in done.stderr
    assert done.stdout == ""


def test_loop_devices_of_others_are_left_alone(runner: Runner, cluster: Cluster) -> None:
    with other_area(cluster.root):
        before = {(device.number, device.backing) for device in loop.attached()}
        process = waiting(runner)
        own = {(device.number, device.backing) for device in runner.cluster.loops()}
        assert len(own) == 1
        assert not own & before
        finish(process)
        # Another program of this host may have attached or detached one of its own meanwhile.
        after = {(device.number, device.backing) for device in loop.attached()}
        assert not own & after
        assert {found for found in before if str(cluster.root) in found[1]} <= after
