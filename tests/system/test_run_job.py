# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run` in front of a command: as if it were not there."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, process_state, until
from support.jobs.runs import Runner, touch

from infiniswap.units import MIB

pytestmark = NEEDS_SWAP

COUNT_SIGNALS = """
import os, signal, sys, time
counts = {}
def on_signal(number, frame):
    counts[number] = counts.get(number, 0) + 1
for name in sys.argv[1].split(","):
    signal.signal(getattr(signal, name), on_signal)
print("ready", os.getpid(), flush=True)
while not counts:
    time.sleep(0.01)
time.sleep(0.5)  # for one too many
print(sorted((signal.Signals(number).name, count) for number, count in counts.items()))
"""


def ready(process: subprocess.Popen[bytes]) -> int:
    """Waits until the job says that it is; returns its pid."""
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[:1] == [b"ready"], (line, process.stderr and process.stderr.read())
    return int(line[1])


@pytest.fixture
def unknown_format(tmp_path: Path) -> Path:
    """A file that may be executed and cannot."""
    path = tmp_path / "binary"
    path.write_bytes(b"\x00\x01\x02\x03")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands(device_runner: Runner, code: int) -> None:
    assert device_runner("sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_the_end_by_a_signal_is_told_as_shells_do(
    device_runner: Runner, number: signal.Signals
) -> None:
    script = f"ulimit -c 0; kill -{int(number)} $$"
    assert device_runner("sh", "-c", script).returncode == 128 + number


def test_bytes_go_in_and_out_untouched(device_runner: Runner) -> None:
    data = os.urandom(1 << 20) + b"\xff\x00\n"
    done = device_runner("cat", options=("--quiet",), input=data)
    assert done.stdout == data
    assert done.stderr == b""
    assert done.returncode == 0


def test_standard_error_is_the_commands_when_quiet(device_runner: Runner) -> None:
    done = device_runner("sh", "-c", "echo out; echo err >&2", options=("--quiet",))
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


def test_directory_environment_and_arguments_are_passed_on(device_runner: Runner) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['ISW_TEST'], sys.argv[1:])"
    env = {**device_runner.cluster.env, "ISW_TEST": "ä b"}
    arguments = ["--local", "a  b", "", "--"]
    done = device_runner(
        sys.executable, "-c", code, *arguments, cwd="/usr", env=env, options=("--quiet",)
    )
    assert done.stdout.decode() == f"/usr ä b {arguments}\n"


def test_no_file_but_the_standard_ones_is_open_in_the_job(device_runner: Runner) -> None:
    done = device_runner("ls", "/proc/self/fd", options=("--quiet",))
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is that of ls itself


def test_signals_are_neither_blocked_nor_ignored_in_the_job(device_runner: Runner) -> None:
    def masks(status: str) -> list[int]:
        lines = [line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
        return [int(line.split()[1], 16) for line in lines]

    done = device_runner("cat", "/proc/self/status", options=("--quiet",))
    blocked, ignored = masks(done.stdout.decode())
    # What was ignored around the tests (glibc leaves its own signals so) is in the job, too;
    # Python's own habits are not.
    around = masks(Path("/proc/self/status").read_text())[1]
    pythons = {signal.SIGPIPE, signal.SIGXFSZ}
    assert blocked == 0
    assert ignored & ~around == 0
    assert not ignored & sum(1 << (number - 1) for number in pythons)


def test_a_command_that_does_not_exist(device_runner: Runner) -> None:
    for name in ("no-such-command-xyz", "/no/such/file", "./nothing"):
        done = device_runner(name)
        assert done.returncode == 127
        assert f"there is no command '{name}'" in done.stderr.decode()


def test_a_file_that_cannot_be_executed(
    device_runner: Runner, tmp_path: Path, unknown_format: Path
) -> None:
    plain = tmp_path / "plain"
    plain.write_text("nothing to execute\n")
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/no/such/interpreter\n")
    wrong.chmod(0o755)
    reasons = {plain: "Permission", wrong: "interpreter", unknown_format: "format"}
    for path, reason in reasons.items():
        done = device_runner(str(path))
        assert done.returncode == 126, (path, done.stderr)
        assert reason in done.stderr.decode()
    assert device_runner("/usr").returncode == 126


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT]
)
def test_a_signal_for_run_alone_is_handed_on_once(
    device_runner: Runner, number: signal.Signals
) -> None:
    process = device_runner.popen(sys.executable, "-c", COUNT_SIGNALS, number.name)
    ready(process)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=WAIT_S)
    assert stdout.decode().strip() == str([(number.name, 1)])
    assert process.returncode == 0


def test_a_signal_that_the_job_sends_to_its_own_group_reaches_it_once(
    device_runner: Runner,
) -> None:
    code = COUNT_SIGNALS.replace('print("ready"', 'os.kill(0, signal.SIGTERM); print("ready"')
    done = device_runner(sys.executable, "-c", code, "SIGTERM", start_new_session=True)
    assert done.stdout.decode().splitlines()[-1] == str([("SIGTERM", 1)])


def test_what_was_ignored_stays_ignored(device_runner: Runner) -> None:
    """As nohup does it: neither `run` nor the job minds a terminal that closes."""
    process = device_runner.popen(
        "sh",
        "-c",
        "echo ready $$; read line; echo $line",
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    ready(process)
    process.send_signal(signal.SIGHUP)
    stdout, _ = process.communicate(b"still here\n", timeout=WAIT_S)
    assert (stdout, process.returncode) == (b"still here\n", 0)


def test_an_exit_code_survives_a_parent_that_ignores_its_children(device_runner: Runner) -> None:
    process = device_runner.popen(
        "sh", "-c", "exit 5", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 5


def test_stopping_and_continuing_run_alone_does_so_to_the_job(device_runner: Runner) -> None:
    # A group of its own within this session: not an orphaned one, where the kernel ignores it.
    process = device_runner.popen(
        "sh", "-c", "echo ready $$; read line; exit 4", stdin=subprocess.PIPE, process_group=0
    )
    pid = ready(process)

    process.send_signal(signal.SIGTSTP)
    until(lambda: process_state(pid) == process_state(process.pid) == "T", "both to be stopped")
    process.send_signal(signal.SIGCONT)
    until(lambda: process_state(pid) != "T" and process_state(process.pid) != "T", "both to go on")
    process.communicate(b"\n", timeout=WAIT_S)
    assert process.returncode == 4


def test_standard_error_that_goes_away_changes_nothing(device_runner: Runner) -> None:
    read_end, write_end = os.pipe()
    process = device_runner.popen(
        "sh", "-c", "echo ready $$; read line; exit 6", stdin=subprocess.PIPE, stderr=write_end
    )
    os.close(write_end)
    ready(process)
    os.close(read_end)
    process.communicate(b"\n", timeout=WAIT_S)
    assert process.returncode == 6


def test_processes_left_in_the_background_are_ended(device_runner: Runner) -> None:
    script = "sleep 1000 & echo $!; setsid sleep 1000 & echo $!; exit 9"
    done = device_runner("sh", "-c", script, stdout=subprocess.PIPE)
    assert done.returncode == 9
    assert "left 2 processes behind" in done.stderr.decode()
    for pid in done.stdout.split():
        assert process_state(int(pid)) in ("", "Z", "X"), (
            pid
        )  # whoever inherits it may reap it late


def test_the_job_is_limited_and_run_is_not(device_runner: Runner) -> None:
    process = device_runner.popen("sh", "-c", "echo ready $$; exec sleep 1000", local="20M")
    pid = ready(process)
    cgroup = device_runner.cgroup(process)
    assert cgroup.memory().limit_bytes == 20 * MIB
    assert pid in cgroup.pids()
    assert process.pid not in cgroup.pids()
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_summary_tells_what_happened(device_runner: Runner) -> None:
    """Compared with what the kernel and the device counted."""
    before = device_runner.status["stats"]
    path = device_runner.cluster.root / "summary.json"
    options = ("--summary-json", str(path))
    done = device_runner(*touch(56, 2), options=options, local="32M")
    assert done.returncode == 0, done.stderr.decode()
    after = device_runner.status["stats"]
    summary = json.loads(path.read_text())
    path.unlink()
    assert summary["exit_code"] == 0
    assert summary["command"] == sys.executable
    assert summary["elapsed_s"] > 0
    assert summary["local_bytes"] == 32 * MIB
    assert 24 * MIB <= summary["local_peak_bytes"] <= 32 * MIB
    assert 56 * MIB <= summary["anon_peak_bytes"] <= 96 * MIB
    assert 24 * MIB <= summary["swap_peak_bytes"] <= 72 * MIB
    assert (summary["oom_kills"], summary["limit"]) == (0, "")
    for key in ("page_in", "page_out"):
        counted = (after[f"{key.replace('_', 's_')}"] - before[f"{key.replace('_', 's_')}"]) * 4096
        assert 24 * MIB <= summary[f"{key}_bytes"] <= counted
    parts = [summary[f"page_in_{who}_bytes"] for who in ("remote", "staging", "backup")]
    assert 0 < sum(parts) <= summary["page_in_bytes"]
    assert summary["remote_share"] == pytest.approx(parts[0] / sum(parts))
    assert 0 < summary["page_in_us_p50"] <= summary["page_in_us_p99"]
    assert summary["shared"] is True
    assert Path(summary["device"]).is_block_device()
    text = done.stderr.decode()
    happened, waited, advice = text.splitlines()[-3:]
    for part in ("exit code 0 after", "with 32.0 MiB local", "paged out", "(donors ", "staging"):
        assert part in happened, text
    assert summary["page_in_waited_s"] > 0
    assert waited.startswith("infiniswap: waited ")
    assert "p99" in waited
    assert advice.startswith("infiniswap: advice: ")


def test_a_job_that_needs_little_pages_nothing(device_runner: Runner) -> None:
    done = device_runner("true")
    assert "peak memory" in done.stderr.decode()
    assert "exit code 0" in done.stderr.decode()


def test_quiet_says_nothing_and_still_writes_the_summary(device_runner: Runner) -> None:
    summary = device_runner.summary("sh", "-c", "exit 0", options=("--quiet",))
    assert summary["command"] == "sh"
    done = device_runner("sh", "-c", "sleep 1000 & exit 1", options=("--quiet",))
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_a_summary_that_cannot_be_written_is_told_before_the_command_runs(
    device_runner: Runner, tmp_path: Path
) -> None:
    for place in (tmp_path / "no" / "such.json", tmp_path):
        done = device_runner("echo", "ran", options=("--summary-json", str(place)))
        assert done.returncode == 2
        assert done.stdout == b""
        assert str(place) in done.stderr.decode()


def test_a_summary_on_a_full_disk_does_not_change_the_exit_code(device_runner: Runner) -> None:
    done = device_runner("sh", "-c", "exit 8", options=("--summary-json", "/dev/full"))
    assert done.returncode == 8
    assert "No space left" in done.stderr.decode()
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_no_summary_file_is_left_when_the_command_never_ran(
    device_runner: Runner, tmp_path: Path, unknown_format: Path
) -> None:
    path = tmp_path / "summary.json"
    done = device_runner(str(unknown_format), options=("--summary-json", str(path)))
    assert done.returncode == 126
    assert not path.exists()
