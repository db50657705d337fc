# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run --paging far`: whole jobs, what ends meanwhile, and what is refused."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, Device, process_state, until
from support.jobs.far_job import (
    FAR,
    FOREVER,
    JOB_MIB,
    at_random,
    check_rounds,
    fill,
    read,
    stop,
    went_far,
)
from support.jobs.runs import Runner, ready

from infiniswap.system.userfault import far_refusal
from infiniswap.units import MIB

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.skipif(far_refusal() is not None, reason=f"needs far memory: {far_refusal()}"),
    pytest.mark.timeout(600),
]

LOCAL = "64M"
LOST_TRIES = 3

FORKS = """
import multiprocessing, sys
pieces = [bytearray(16 << 20) for _ in range(int(sys.argv[1]) // 16)]
for index, piece in enumerate(pieces):
    for at in range(0, len(piece), 4096):
        piece[at : at + 8] = (index << 32 | at).to_bytes(8, "little")

def check(index):
    piece = pieces[index]
    return all(
        piece[at : at + 8] == (index << 32 | at).to_bytes(8, "little")
        for at in range(0, len(piece), 4096)
    )

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert all(pool.map(check, range(len(pieces))))
assert all(map(check, range(len(pieces))))
print("all there")
"""

# ---------------------------------------------------------------------------- whole jobs


def test_a_job_three_times_its_limit_goes_far_and_gets_every_byte_back(runner: Runner) -> None:
    # For seconds: the device is asked about once in one.
    summary = runner.summary(*fill(8), options=FAR, local=LOCAL)
    far = summary["far"]
    assert (far["unfit"], far["problem"], far["lost_pages"]) == ("", "", 0)
    assert far["peak_bytes"] > 64 * MIB
    assert min(far["out_bytes"], far["in_bytes"]) > 64 * MIB
    assert far["fetches"] + far["small_fetches"] > 0
    assert far["fetch_wait_s"] > 0
    assert summary["anon_peak_bytes"] < (JOB_MIB + 64) * MIB
    assert summary["swap_peak_bytes"] < 32 * MIB
    assert summary["local_peak_bytes"] <= 64 * MIB
    assert summary["page_in_remote_bytes"] > 0
    assert summary["page_in_waited_s"] > 0
    assert runner.leftovers() == []


def test_files_that_a_job_reads_do_not_send_its_memory_to_swap(
    runner: Runner, tmp_path: Path
) -> None:
    """To keep files, the kernel swaps out memory that far memory would take. Such jobs took up to
    twelve times as long when their input was not cached."""
    file = tmp_path / "input"
    file.write_bytes(os.urandom(MIB) * JOB_MIB)
    os.sync()
    summary = runner.summary(*read(file, 3, JOB_MIB), options=FAR, local="128M")
    far = summary["far"]
    assert far["out_bytes"] > 256 * MIB
    assert summary["swap_peak_bytes"] < 44 * MIB  # left to itself, the kernel takes 50 to 80
    assert (far["handed_back_bytes"], far["lost_pages"]) == ({}, 0)


def test_a_job_that_touches_pages_at_random_is_left_to_swap(runner: Runner) -> None:
    """Its bytes come from far memory before, and from swap afterwards."""
    options = (*FAR[:-1], "512M")  # swap has room for all of it
    summary = runner.summary(*at_random(200_000), options=options, local=LOCAL)
    far = summary["far"]
    assert far["pauses"] >= 1
    assert far["pause_s"] > 0
    assert far["out_bytes"] > 64 * MIB
    assert far["swap_bytes"] > 32 * MIB
    assert (far["problem"], far["lost_pages"], far["handed_back_bytes"]) == ("", 0, {})
    assert runner.leftovers() == []


def test_a_job_of_a_sudo_caller_goes_far(runner: Runner) -> None:
    entry = pwd.getpwnam("nobody")
    env = {**runner.cluster.env, "SUDO_UID": str(entry.pw_uid), "SUDO_GID": str(entry.pw_gid)}
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("needs python3 where every user may execute it")
    runner.cluster.root.chmod(0o711)
    shared = runner.cluster.root / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    options = (*FAR, "--summary-json", str(shared / "summary.json"))
    done = runner(*fill(8, python=python), options=options, local=LOCAL, env=env, cwd="/")
    assert done.returncode == 0, done.stderr.decode()
    assert "the command runs as nobody, who called sudo" in done.stderr.decode()
    assert json.loads((shared / "summary.json").read_text())["far"]["peak_bytes"] > 64 * MIB


def test_a_small_program_has_no_far_memory_and_ends_as_always(runner: Runner) -> None:
    done = runner("sh", "-c", "echo out; exit 7", options=FAR, local=LOCAL)
    assert (done.returncode, done.stdout) == (7, b"out\n")
    assert len(done.stderr.decode().splitlines()[-3:]) == 3


def test_forked_workers_see_all_that_was_far(runner: Runner) -> None:
    path = runner.cluster.root / "summary.json"
    command = (sys.executable, "-c", FORKS, "128")
    done = runner(*command, options=(*FAR, "--summary-json", str(path)), local=LOCAL)
    summary = json.loads(path.read_text())
    path.unlink()
    assert (done.returncode, done.stdout) == (0, b"all there\n"), done.stderr.decode()
    assert summary["far"]["handed_back_bytes"]["fork"] > 32 * MIB
    assert re.search(r"handed back to swap [0-9.]+ MiB \(fork\)", done.stderr.decode())
    assert runner.leftovers() == []


def test_the_agent_is_in_the_jobs_programs_alone(runner: Runner) -> None:
    """Not in `run`, nor in the device's processes."""
    waits = "import signal; print('ready', flush=True); signal.pause()"
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(waits)}"
    process = runner.popen("sh", "-c", command, options=FAR, local=LOCAL)
    ready(process)

    def has_agent(pid: int) -> bool:
        environment = Path("/proc", str(pid), "environ").read_bytes()
        maps = Path("/proc", str(pid), "maps").read_text()
        assert (b"INFINISWAP_FAR=" in environment) == ("libinfiniswap-far" in maps)
        return "libinfiniswap-far" in maps

    (job,) = runner.cgroup(process).pids()
    assert has_agent(job)
    ours = {process.pid, int(runner.status["pid"]), *runner.cluster.processes()} - {job}
    assert not any(has_agent(pid) for pid in ours if process_state(pid) not in ("", "Z"))
    stop(process)


FILLS = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void)
{
	size_t bytes = 96u << 20;
	unsigned char *at = malloc(bytes);

	memset(at, 7, bytes);
	for (size_t i = 0; i < bytes; i += 4096)
		if (at[i] != 7)
			return 9;
	free(at);
	return puts("all there") < 0;
}
"""


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("gcc -fsanitize=address", marks=pytest.mark.requires_tool("gcc")),
        pytest.param("musl-gcc", marks=[pytest.mark.full, pytest.mark.requires_tool("musl-gcc")]),
    ],
)
def test_a_child_that_cannot_have_the_agent_runs_without_it(
    runner: Runner, tmp_path: Path, compiler: str
) -> None:
    source = tmp_path / "fills.c"
    source.write_text(FILLS)
    subprocess.run([*compiler.split(), "-o", tmp_path / "fills", source], check=True)
    summary = tmp_path / "summary.json"
    options = (*FAR, "--summary-json", str(summary))
    done = runner("sh", "-c", f"{tmp_path}/fills; exit $?", options=options, local=LOCAL)
    assert (done.returncode, done.stdout) == (0, b"all there\n"), done.stderr.decode()
    assert json.loads(summary.read_text())["far"]["out_bytes"] == 0


def test_far_memory_smaller_than_a_block_is_refused_before_anything_starts(
    runner: Runner,
) -> None:
    for more in ((), ("--dry-run",)):
        options = ("--paging", "far", "--size", "1M", *more)
        done = runner("true", options=options, local=LOCAL)
        assert done.returncode == 2
        assert b"needs a --size of at least 2M, not 1.00 MiB" in done.stderr
    assert runner.leftovers() == []


def test_a_command_of_ours_in_a_job_has_no_agent(runner: Runner) -> None:
    command = (sys.executable, "-m", "infiniswap", "config", "check")
    done = runner(*command, options=FAR, local=LOCAL)
    assert b"INFINISWAP_FAR" not in done.stdout + done.stderr


# --------------------------------------------------------------------------- who ends


def test_a_job_killed_by_another_leaves_nothing_far(runner: Runner) -> None:
    process = runner.popen(*fill(FOREVER), options=FAR, local=LOCAL)
    check_rounds(process, 0)
    until(lambda: went_far(runner), "far memory")
    for pid in runner.cgroup(process).pids():
        os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 128 + signal.SIGKILL, stderr.decode()
    assert "the kernel killed nothing for want of memory" in stderr.decode()
    assert runner.leftovers() == []


def test_a_killed_run_leaves_nothing_far(runner: Runner) -> None:
    process = runner.popen(*fill(FOREVER), options=FAR, local=LOCAL)
    check_rounds(process, 0)
    until(lambda: went_far(runner), "far memory")
    process.kill()
    runner.nothing_left()


def test_a_job_goes_on_when_the_process_of_its_device_is_killed(
    cluster: Cluster,
) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    cluster.donor()
    runner = Runner(cluster)
    process = runner.popen(*fill(FOREVER), options=FAR, local=LOCAL)
    try:
        check_rounds(process, 0)
        until(lambda: went_far(runner), "far memory")
        device = Device(cluster, "run")
        device.wait_standby()
        os.kill(device.pid, signal.SIGKILL)
        device.wait_take_over(1)
        check_rounds(process, 1, 2, 3)
        until(lambda: went_far(runner), "far memory with the successor")
        said = stop(process)
        assert "1 take-over by another process of the device" in said
        runner.nothing_left()
    finally:
        runner.end()


def test_a_job_goes_on_from_the_backup_when_all_donors_are_killed(cluster: Cluster) -> None:
    donors = [cluster.donor(), cluster.donor()]
    runner = Runner(cluster)
    process = runner.popen(*fill(FOREVER), options=FAR, local=LOCAL)
    try:
        check_rounds(process, 0)
        until(lambda: went_far(runner), "far memory")
        for donor in donors:
            donor.end(signal.SIGKILL)
        check_rounds(process, 1, 2)
        said = stop(process)
        assert "donors gone meanwhile" in said
        assert "from the disk " in said
        runner.nothing_left()
    finally:
        runner.end()


def lose_all_copies(cluster: Cluster) -> tuple[int, str, dict[str, Any]]:
    """A job's exit code, what was said, and its summary: all donors of it are killed."""
    donors = [cluster.donor(), cluster.donor()]
    runner = Runner(cluster)
    path = cluster.root / "summary.json"
    lossy = ("--backup", "none", "--allow-data-loss", "--summary-json", str(path))
    process = runner.popen(*fill(FOREVER), options=(*FAR, *lossy), local=LOCAL)
    try:
        check_rounds(process, 0)
        until(lambda: went_far(runner), "far memory")
        for donor in donors:
            donor.end(signal.SIGKILL)
        _, stderr = process.communicate(timeout=2 * WAIT_S)
        runner.nothing_left()
        return process.returncode, stderr.decode(), json.loads(path.read_text())
    finally:
        runner.end()


def test_pages_of_which_no_copy_is_left_end_the_job_with_sigbus_and_are_counted(
    cluster: Cluster,
) -> None:
    for _ in range(LOST_TRIES):
        exit_code, said, summary = lose_all_copies(cluster)
        if summary["far"]["lost_pages"] > 0:
            break
        # On a busy host it may miss a page of its stack first, which the kernel had in swap.
        assert summary["far"]["swap_bytes"] > 0, said
    assert summary["far"]["lost_pages"] > 0, said
    assert exit_code == 128 + signal.SIGBUS, said
    assert re.search(r"advice: far memory was lost: .* \d+ pages? of what", said)


# ------------------------------------------------------------------- refusals, other ways


@pytest.mark.parametrize(
    ("options", "local", "reason"),
    [
        (("--paging", "far"), "63M", "at least 64M of local memory"),
        (("--paging", "far", "--device", "swap0"), LOCAL, "cannot be used together with --device"),
        (("--paging", "warp"), LOCAL, "'warp' is not one of far, swap"),
    ],
)
def test_what_cannot_be_far_is_refused_before_anything_starts(
    runner: Runner, options: tuple[str, ...], local: str, reason: str
) -> None:
    done = runner("echo", "ran", options=options, local=local)
    assert (done.returncode, done.stdout) == (2, b""), done.stderr.decode()
    assert reason in done.stderr.decode()
    assert runner.cluster.names() == []


def test_a_shell_with_little_address_space_is_refused(runner: Runner) -> None:
    argv = runner.argv("echo", "ran", options=FAR, local=LOCAL)
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 8000000; exec "$@"', "sh", *argv],
        env=runner.cluster.env,
        capture_output=True,
        check=False,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stdout) == (5, b""), done.stderr.decode()
    assert b"ulimit -v unlimited" in done.stderr


@pytest.fixture
def static_program(cluster: Cluster) -> Iterator[Path]:
    source, program = cluster.root / "x.c", cluster.root / "x"
    source.write_text("int main(void) { return 3; }\n")
    if subprocess.run(["gcc", "-static", "-o", program, source], check=False).returncode != 0:
        pytest.skip("needs gcc and a static libc")
    yield program
    program.unlink()


def test_a_static_program_runs_with_swap_alone_and_the_end_says_so(
    runner: Runner, static_program: Path
) -> None:
    path = runner.cluster.root / "summary.json"
    options = (*FAR, "--summary-json", str(path))
    done = runner(str(static_program), options=options, local=LOCAL)
    assert done.returncode == 3
    assert '"unfit": "' in path.read_text()
    path.unlink()
    said = done.stderr.decode()
    assert said.count("cannot load the agent: it is statically linked") == 2, said


def test_a_dry_run_says_what_far_memory_takes(runner: Runner) -> None:
    done = runner("sleep", "9", options=("--dry-run", *FAR), local=LOCAL)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    assert re.search(r"^far +256M beside that", text, re.MULTILINE), text
    assert re.search(r"^backup .*: takes 512 MiB", text, re.MULTILINE), text
    assert re.search(r"^cost .*for one process with far memory", text, re.MULTILINE), text
    assert runner.leftovers() == []
