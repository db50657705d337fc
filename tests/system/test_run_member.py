# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run --device` without root: by members of the group, by others, and by villains."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, Device, until
from support.jobs.plans import plan_in, second_long
from support.jobs.runs import Runner, touch

from infiniswap.device.process.member_socket import CONNECTIONS_PER_USER_MAX, RUNS_PER_USER_MAX
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.units import MIB

pytestmark = [*NEEDS_SWAP, pytest.mark.requires_tool("setpriv", "/usr/bin/python3")]

# Groups and users that every Debian has; nothing else belongs to this group.
GROUP = "games"
MEMBER, OTHER_MEMBER = "nobody", "bin"


@pytest.fixture(scope="module")
def member_device(module_cluster: Cluster, in_ci: bool) -> Iterator[Device]:
    """A swap device for members of GROUP."""
    probe = as_user(
        MEMBER, [sys.executable, "-c", "import infiniswap.device.control.member_client"]
    )
    done = subprocess.run(probe, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode != 0:
        missing = f"needs an interpreter and a checkout that other users can read: {done.stderr}"
        (pytest.fail if in_ci else pytest.skip)(missing)
    module_cluster.env["INFINISWAP_DEVICE_GROUP"] = GROUP
    module_cluster.root.chmod(0o755)
    device = module_cluster.start("--swap", size="128M")
    try:
        yield device
    finally:
        device.remove()


@pytest.fixture
def member_runner(member_device: Device) -> Iterator[Runner]:
    own = Runner(member_device.cluster, member_device)
    try:
        yield own
    finally:
        own.close()


def as_user(name: str, argv: list[str], *, member: bool = True) -> list[str]:
    """The command line with which root becomes that user."""
    user = pwd.getpwnam(name)
    groups = f"--groups={grp.getgrnam(GROUP).gr_gid}" if member else "--clear-groups"
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", groups, *argv]


def run_as(
    runner: Runner, argv: list[str], *, user: str = MEMBER, member: bool = True, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs any command as a user, in a directory that is everybody's."""
    return subprocess.run(
        as_user(user, argv, member=member),
        **{"env": runner.cluster.env, "cwd": "/", "capture_output": True, **more},
        text=True,
        check=False,
        timeout=2 * WAIT_S,
    )


def inside(
    runner: Runner, cgroup: MemoryCgroup, argv: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a member's command in a cgroup."""
    enter = f'echo $$ > {cgroup.path}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", enter, "sh", *as_user(MEMBER, argv)],
        env=runner.cluster.env,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


@contextlib.contextmanager
def job_of(runner: Runner, user: str = MEMBER) -> Iterator[subprocess.Popen[bytes]]:
    """A member's run whose job waits for a line and then ends with 5."""
    argv = runner.argv("sh", "-c", "echo ready; read line; exit 5")
    process = subprocess.Popen(
        as_user(user, argv),
        env=runner.cluster.env,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    runner.running.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", process.communicate()[1].decode()
    yield process
    if process.poll() is None:
        _, stderr = process.communicate(b"\n", timeout=2 * WAIT_S)
        assert process.returncode == 5, stderr.decode()


def ask(runner: Runner, code: str, *, user: str = MEMBER) -> str:
    """What a program of a user's prints that has `member_client`, `paths` and `ask` at hand."""
    done = run_as(runner, asking(runner, code), user=user)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asking(runner: Runner, code: str) -> list[str]:
    """Command line of such a program."""
    assert runner.device is not None
    lines = (
        "import os, sys, subprocess, time",
        "from pathlib import Path",
        "from infiniswap.device import member_api as api",
        "from infiniswap.device.control import member_client",
        "from infiniswap.device.spec import rundir",
        "from infiniswap.errors import InfiniswapError",
        f"run_dir = Path({str(runner.cluster.run_dir)!r})",
        f"paths = rundir.paths_of({runner.device.name!r}, run_dir, run_dir)",
        "def ask(question):",
        "    try:",
        "        member_client.ask(paths, question)",
        "    except InfiniswapError as error:",
        "        return f'{error.exit_code} {error}'",
        "    return 'done'",
    )
    return [sys.executable, "-c", "\n".join((*lines, code))]


# --------------------------------------------------------------------- in good order


def test_a_members_job_pages_and_gets_every_byte_back(member_runner: Runner) -> None:
    summary = Path("/tmp") / f"isw-member-{os.getpid()}.json"
    command = ["/usr/bin/python3", *touch(72, 2)[1:]]
    argv = member_runner.argv(*command, options=("--summary-json", str(summary)), local="24M")
    try:
        done = run_as(member_runner, argv)
        assert done.returncode == 0, done.stderr
        told = json.loads(summary.read_text())
        assert summary.stat().st_uid == pwd.getpwnam(MEMBER).pw_uid
    finally:
        summary.unlink(missing_ok=True)
    assert told["local_peak_bytes"] <= 24 * MIB
    assert told["anon_peak_bytes"] >= 72 * MIB
    assert told["page_in_remote_bytes"] > 0
    assert "Traceback" not in done.stderr


def test_the_job_is_the_members_and_the_exit_code_its_own(member_runner: Runner) -> None:
    done = run_as(member_runner, member_runner.argv("sh", "-c", "id -un; id -Gn; exit 7"))
    assert (done.returncode, done.stdout.split()) == (7, [MEMBER, "nogroup", GROUP])


def test_what_the_job_leaves_behind_is_ended(member_runner: Runner) -> None:
    done = run_as(member_runner, member_runner.argv("sh", "-c", "sleep 10000 & exit 0"))
    assert done.returncode == 0, done.stderr
    assert "left 1 process behind" in done.stderr


def test_a_member_whose_run_is_killed_leaves_nothing(member_runner: Runner) -> None:
    with job_of(member_runner) as process:
        assert member_runner.cgroup(process).pids()
        process.kill()
        process.wait(WAIT_S)
    member_runner.nothing_left()


def test_two_members_at_once(member_runner: Runner) -> None:
    with job_of(member_runner) as one, job_of(member_runner, OTHER_MEMBER) as other:
        assert member_runner.status["runs"] == sorted([one.pid, other.pid])


def test_a_members_plan_is_made_without_the_rights_of_root(member_runner: Runner) -> None:
    assert member_runner.device is not None
    argv = [sys.executable, "-m", "infiniswap", "plan", "--json"]
    job = second_long(["/usr/bin/python3", *touch(64, 24)[1:]])
    argv += ["--device", member_runner.device.name, "--", *job]
    done = run_as(member_runner, argv)
    assert done.returncode == 0, done.stderr
    found = plan_in(done.stdout)
    assert found["probe_page_ins"] > 0, done.stdout + done.stderr
    assert found["probe_share"] < 1.0  # its limit was taken away, or it would have been ended
    assert found["curve"][-1]["page_ins"] > 0
    assert found["recommended"]["limit_bytes"] > 0
    notes = "\n".join(found["notes"])
    assert "pages cannot be seen" in notes
    assert "later plans will not know what a page costs here" in notes  # root's state directory


# -------------------------------------------------------------------------- refusals


def test_who_is_no_member_is_told_how_to_become_one(member_runner: Runner) -> None:
    done = run_as(member_runner, member_runner.argv("echo", "ran"), member=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert f"only root and members of the group {GROUP}" in done.stderr
    assert f"usermod -aG {GROUP} {MEMBER}" in done.stderr


def test_a_member_needs_a_declared_device(member_runner: Runner) -> None:
    argv = [sys.executable, "-m", "infiniswap", "run", "--local", "32M", "--", "echo", "ran"]
    done = run_as(member_runner, argv)
    assert (done.returncode, done.stdout) == (4, "")
    assert "--device NAME" in done.stderr


def test_a_device_that_is_not_there(member_runner: Runner) -> None:
    argv = [sys.executable, "-m", "infiniswap", "run", "--local", "32M", "--device", "nosuch"]
    done = run_as(member_runner, [*argv, "--", "echo", "ran"])
    assert (done.returncode, done.stdout) == (11, "")
    assert member_runner.device is not None
    assert member_runner.device.name in done.stderr


def test_a_device_started_without_such_a_group(member_runner: Runner) -> None:
    cluster = member_runner.cluster
    device = cluster.start("--swap", size="16M", INFINISWAP_DEVICE_GROUP="isw-no-such-group")
    try:
        done = run_as(member_runner, Runner(cluster, device).argv("echo", "ran"))
    finally:
        device.remove()
    assert (done.returncode, done.stdout) == (4, "")
    assert "groupadd" in done.stderr


def test_the_devices_own_socket_stays_roots(member_runner: Runner) -> None:
    assert member_runner.device is not None
    for action in ("stop", "remove"):
        argv = [sys.executable, "-m", "infiniswap", "device", action, member_runner.device.name]
        done = run_as(member_runner, argv)
        assert done.returncode == 4, done.stderr
    assert member_runner.status["state"] == "serving"


def test_a_limit_above_the_member_holds_for_its_jobs(member_runner: Runner) -> None:
    cgroup = create_memory_cgroup(f"isw-test-{os.getpid()}", 128 * MIB)
    try:

        def limited(local: str) -> subprocess.CompletedProcess[str]:
            return inside(member_runner, cgroup, member_runner.argv("echo", "ran", local=local))

        done = limited("256M")
        assert (done.returncode, done.stdout) == (13, "")
        assert "128 MiB" in done.stderr
        done = limited("64M")
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
        code = (
            "cgroup = member_client.begin(paths, 64 << 20)\n"
            "for wanted in (256 << 20, 128 << 20): print(ask(api.AskRaise(local_bytes=wanted)))"
        )
        more, most = inside(member_runner, cgroup, asking(member_runner, code)).stdout.splitlines()
        assert more.startswith("13 ")
        assert "128 MiB" in more
        assert most == "done"
    finally:
        cgroup.kill()
        cgroup.remove()


def test_who_enters_a_run_escapes_no_memory_limit(member_runner: Runner) -> None:
    """The run began without one; what enters it must not have had one below the job's."""
    cgroup = create_memory_cgroup(f"isw-test-{os.getpid()}", 20 * MIB)
    try:
        with job_of(member_runner) as process:
            enter = f"print(ask(api.AskEnter(run={process.pid})))"
            code = f"{enter}; print(Path('/proc/self/cgroup').read_text())"

            def enters() -> str:
                return inside(member_runner, cgroup, asking(member_runner, code)).stdout

            said = enters()
            assert said.startswith("13 you may use 20.0 MiB of this host's memory"), said
            assert cgroup.path.name in said  # it has stayed where it was
            cgroup.set_limit(64 * MIB)
            said = enters()
            assert said.startswith("done"), said
            assert member_runner.cgroup(process).path.name in said
    finally:
        cgroup.kill()
        cgroup.remove()


def test_a_run_that_a_limited_process_entered_stays_below(member_runner: Runner) -> None:
    """Its limit would be escaped by raising the job's."""
    cgroup = create_memory_cgroup(f"isw-test-{os.getpid()}", 96 * MIB)
    enter = asking(member_runner, "print(ask(api.AskEnter(run=int(sys.argv[1]))))")
    code = (
        "member_client.begin(paths, 64 << 20)\n"
        "print(os.getpid(), flush=True); input()\n"
        "for wanted in (128 << 20, 96 << 20): print(ask(api.AskRaise(local_bytes=wanted)))"
    )
    try:
        argv = as_user(MEMBER, asking(member_runner, code))
        run = subprocess.Popen(
            argv,
            env=member_runner.cluster.env,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        member_runner.running.append(run)  # type: ignore[arg-type]
        assert run.stdout is not None
        pid = run.stdout.readline().strip()
        assert inside(member_runner, cgroup, [*enter, pid]).stdout == "done\n"
        more, most = run.communicate("\n", timeout=WAIT_S)[0].splitlines()
        assert more.startswith("13 you may use 96.0 MiB"), more
        assert most == "done"
    finally:
        cgroup.kill()
        cgroup.remove()


# -------------------------------------------------------------------------- villains


@pytest.fixture
def become_root() -> Iterator[Path]:
    """A program that every user may run as root."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "become-root"
        shutil.copy("/usr/bin/setpriv", path)
        path.chmod(0o4755)
        yield path


def test_a_setuid_program_of_a_members_job_is_left_running(
    member_runner: Runner, become_root: Path
) -> None:
    """As `sudo` is, which the member may not end either; the rest of the job is ended."""
    quietly = ">/dev/null 2>&1 &"  # else they would hold the pipes open that are read here
    script = (
        f"sleep 9876 {quietly} {become_root} --reuid=0 --clear-groups sleep 9877 {quietly} "
        "echo $!; until grep -qx sleep /proc/$!/comm; do :; done"
    )
    done = run_as(member_runner, member_runner.argv("sh", "-c", script))
    roots = int(done.stdout)
    try:
        assert done.returncode == 0, done.stderr
        assert f"process {roots} (sleep) has the rights of another user" in done.stderr
        assert Path(f"/proc/{roots}/cmdline").read_bytes() == b"sleep\x009877\x00"
        member_runner.nothing_left()
        (cgroup,) = [c for c in find_job_cgroups() if roots in c.pids()]
        assert cgroup.pids() == (roots,)
    finally:
        os.kill(roots, signal.SIGKILL)
    until(lambda: not cgroup.path.exists(), "the end of the job's cgroup")


def test_a_job_cannot_change_its_cgroup(member_runner: Runner) -> None:
    script = (
        'for file in "$1"/memory.max "$1"/memory.limit_in_bytes "$1"/cgroup.procs; do '
        '[ -e "$file" ] && { echo 1 > "$file" && echo written; }; done 2>/dev/null; '
        'mkdir "$1"/below 2>/dev/null && echo made; rmdir "$1" 2>/dev/null && echo removed; exit 0'
    )
    with job_of(member_runner) as process:
        path = member_runner.cgroup(process).path
        done = run_as(member_runner, ["sh", "-c", script, "sh", str(path)])
        assert (done.stdout, path.is_dir()) == ("", True)


def test_a_members_run_is_not_another_members(member_runner: Runner) -> None:
    with job_of(member_runner) as process:
        code = f"print(ask(api.AskEnter(run={process.pid})))"
        assert "no run of yours" in ask(member_runner, code, user=OTHER_MEMBER)
        # Only the run itself can end itself: a process of the same user has no such run, either.
        for user in (MEMBER, OTHER_MEMBER):
            code = "print(ask(api.AskEnd())); print(ask(api.AskKill()))"
            assert ask(member_runner, code, user=user).count("no run of yours") == 2
        assert process.poll() is None
        assert ask(member_runner, f"print(ask(api.AskEnter(run={process.pid})))") == "done\n"


def test_a_limit_can_only_be_raised(member_runner: Runner) -> None:
    """Lowered, it would page out in the name of the process that serves the pages."""
    code = (
        "print(ask(api.AskRaise(local_bytes=96 << 20)))\n"
        "cgroup = member_client.begin(paths, 64 << 20)\n"
        "for wanted in (32 << 20, 1 << 62, 96 << 20, 64 << 20):\n"
        "    print(ask(api.AskRaise(local_bytes=wanted)))\n"
        "print(cgroup.memory().limit_bytes >> 20)\n"
    )
    before, lower, nonsense, more, less, limit = ask(member_runner, code).splitlines()
    assert "no run of yours" in before
    assert "can only be raised" in lower
    assert "makes no sense" in nonsense
    assert (more, limit) == ("done", "96")
    assert "can only be raised" in less


@pytest.mark.parametrize("local_bytes", [-1, 0, 4096, 1 << 62, 1 << 70])
def test_limits_that_make_no_sense(member_runner: Runner, local_bytes: int) -> None:
    said = ask(member_runner, f"print(ask(api.AskBegin(local_bytes={local_bytes})))")
    assert said.startswith("2 ")


def test_runs_of_one_user_are_bounded(member_runner: Runner) -> None:
    code = (
        "def begin():\n"
        "    if pid := os.fork(): return pid\n"
        "    member_client.begin(paths, 32 << 20); os.write(told, b'1'); time.sleep(10000)\n"
        "begun, told = os.pipe()\n"
        f"held = [begin() for _ in range({RUNS_PER_USER_MAX})]\n"
        "for _ in held: assert os.read(begun, 1)\n"
        "print(ask(api.AskBegin(local_bytes=32 << 20)), flush=True)\n"
        "for pid in held: os.kill(pid, 9); os.waitpid(pid, 0)\n"
    )
    said = ask(member_runner, code)
    assert said.startswith("9 "), said
    assert f"{RUNS_PER_USER_MAX} and" in said
    until(lambda: not member_runner.status["runs"], "the end of all runs")


def test_a_run_can_begin_once(member_runner: Runner) -> None:
    question = "print(ask(api.AskBegin(local_bytes=32 << 20)))"
    first, second = ask(member_runner, f"{question}\n{question}").splitlines()
    assert first == "done"
    assert second.startswith("9 ")
    member_runner.nothing_left()
    until(lambda: not [c for c in find_job_cgroups() if not c.pids()], "no cgroup left")


def test_a_process_with_rights_of_two_users_is_refused(member_runner: Runner) -> None:
    """As a setuid program has; nothing of it may come under a member's limit."""
    with job_of(member_runner, OTHER_MEMBER) as process:
        ids = (pwd.getpwnam(MEMBER).pw_uid, pwd.getpwnam(OTHER_MEMBER).pw_uid)
        code = (
            f"os.setresuid({ids[0]}, {ids[1]}, {ids[0]})\n"
            f"print(ask(api.AskEnter(run={process.pid})), ask(api.AskBegin(local_bytes=1 << 25)))"
        )
        # By root: the group stays, two of the users change.
        said = ask(member_runner, code, user="root")
        assert said.count("has the rights of more than one user") == 2, said


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{}\n", b'{"ask":"stop"}\n', b"[" * 4000 + b"\n", b"x" * 100_000, b"\xff\n"],
)
def test_garbage_is_no_question(member_runner: Runner, line: bytes) -> None:
    assert member_runner.device is not None
    path = member_runner.cluster.run_dir / member_runner.device.name / "members.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(str(path))  # as root, who belongs to every group
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(line)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(65536)
            assert not answer or b"not a question" in answer
    assert member_runner.status["state"] == "serving"


def test_connections_of_one_user_are_bounded_and_shut_nobody_else_out(
    member_runner: Runner,
) -> None:
    hold = (
        "import socket\n"
        "def connect():\n"
        "    sock = socket.socket(socket.AF_UNIX); sock.connect(str(paths.member_socket))\n"
        "    return sock\n"
        f"held = [connect() for _ in range({CONNECTIONS_PER_USER_MAX})]\n"
        "one = connect(); one.settimeout(60)\n"
        "print(one.recv(1), flush=True)\n"
    )
    assert ask(member_runner, hold) == "b''\n"
    with job_of(member_runner, OTHER_MEMBER):
        pass


def test_root_uses_the_same_device_as_ever(member_runner: Runner) -> None:
    done = member_runner("sh", "-c", "kill -TERM $$")
    assert done.returncode == 128 + signal.SIGTERM
