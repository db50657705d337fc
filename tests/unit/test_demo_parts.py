# SPDX-License-Identifier: Apache-2.0
"""The demo's smaller parts: host checks, children, signals, disk figures."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.machine.ran import ran

from infiniswap import extras
from infiniswap.demo import children, data, legs, requirements, volume
from infiniswap.demo.results import FAR, Leg
from infiniswap.errors import (
    DeadlineError,
    NotFoundError,
    NotPermittedError,
    SystemCallError,
    UnavailableError,
)
from infiniswap.extras import DEMO, SIMULATE
from infiniswap.system.interrupts import Interrupted, Interrupts
from infiniswap.units import GIB

# ------------------------------------------------------------------------- requirements


def test_missing_packages_and_tools_are_named_with_the_remedy() -> None:
    told = r"pandas, pyarrow, tpchgen-cli.*-m pip install pandas pyarrow tpchgen-cli"
    with pytest.raises(UnavailableError, match=told):
        requirements.check_packages(lambda name: None, lambda: None)
    requirements.check_packages(lambda name: object(), lambda: "/bin/tpchgen-cli")


@pytest.mark.parametrize(("extra", "libraries"), [("demo", DEMO), ("simulate", SIMULATE)])
def test_libraries_are_named_as_in_the_extras(
    project_root: Path, extra: str, libraries: tuple[str, ...]
) -> None:
    project = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]
    declared = [re.split("[<>=]", text)[0] for text in project["optional-dependencies"][extra]]
    assert declared == list(libraries)


def test_the_name_of_a_foreign_project_is_not_installed(project_root: Path) -> None:
    """The index has a project `infiniswap` that is not this one."""
    documents = [project_root / "README.md", *(project_root / "docs").rglob("*.md")]
    texts = [*documents, *(project_root / "infiniswap").rglob("*.py")]
    wrong = re.compile(r"pip[^\n]* install[^\n]*\binfiniswap(?![-\w/.])")
    assert [path for path in texts if wrong.search(path.read_text())] == []


def test_the_debian_package_names_the_wheel_for_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "packaged_in", lambda: Path("/usr/lib/infiniswap"))
    with pytest.raises(UnavailableError) as caught:
        requirements.check_packages(lambda name: None, lambda: None)
    assert "pip install infiniswap-*.whl pandas" in caught.value.mend
    assert "sudo with-libraries/bin/infiniswap demo" in caught.value.mend
    with pytest.raises(UnavailableError, match="no-such-tool"):
        requirements.check_tools(["sh", "no-such-tool"])
    requirements.check_tools(["sh"])


def test_a_full_disk_and_a_missing_directory_are_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="--dir"):
        requirements.check_disk(tmp_path / "absent", lambda path: None)
    with pytest.raises(SystemCallError, match="--dir"):
        requirements.check_disk(tmp_path, lambda path: SimpleNamespace(free=GIB))
    requirements.check_disk(tmp_path, lambda path: SimpleNamespace(free=4 * GIB))
    with pytest.raises(SystemCallError, match=r"needs 7\.00 GiB .* 4\.00 GiB are free"):
        requirements.check_disk(tmp_path, lambda path: SimpleNamespace(free=4 * GIB), 7 * GIB)


@pytest.mark.requires_unprivileged
def test_not_root_is_told_first(tmp_path: Path) -> None:
    with pytest.raises(NotPermittedError, match="sudo infiniswap demo"):
        requirements.check(tmp_path)


# ----------------------------------------------------------------------------- children


def test_children_know_nothing_of_this_installation_or_of_sudo() -> None:
    foreign = {"INFINISWAP_DEVICE_SLAB": "1G", "SUDO_UID": "1000"}
    env = children.environment({**foreign, "HOME": "/root", "PATH": "/bin"})
    assert not env.keys() & foreign.keys()
    assert env["OMP_NUM_THREADS"] == "1"


def test_a_placed_child_enters_its_cgroups_before_its_program_starts(tmp_path: Path) -> None:
    for name in ("one", "two words"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    command = children.placed(
        ["sh", "-c", 'echo "$$ $*"', "x", "a b", "--"], [tmp_path / "one", tmp_path / "two words"]
    )
    pid, _, rest = ran(*command).stdout.strip().partition(" ")
    assert rest == "a b --"
    assert (tmp_path / "one/cgroup.procs").read_text().strip() == pid
    assert (tmp_path / "two words/cgroup.procs").read_text().strip() == pid


def test_a_child_that_cannot_be_placed_does_not_start(tmp_path: Path) -> None:
    command = children.placed(["touch", str(tmp_path / "started")], [tmp_path / "absent"])
    assert ran(*command).returncode == 125
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo why; exit 3", "the job ended with exit code 3; it last said: why"),
        ("kill -9 $$", "killed by signal 9"),
    ],
)
def test_a_failed_child_is_told_with_its_last_words(tmp_path: Path, script: str, told: str) -> None:
    child = children.Child("the job", ["sh", "-c", script], tmp_path / "log")
    with pytest.raises(SystemCallError, match=told):
        child.check(child.wait(30, lambda: None, 0.01))
    child.end(1.0)


def test_waiting_is_bounded_samples_and_ending_is_sure(tmp_path: Path) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    child = children.Child("the job", stubborn, tmp_path / "log")
    samples: list[int] = []
    while "ready" not in child.log_tail():
        os.sched_yield()
    with pytest.raises(DeadlineError, match="the job did not end"):
        child.wait(0.05, lambda: samples.append(1), 0.01)
    assert samples
    child.end(0.01)
    assert child.exit_code == -signal.SIGKILL
    child.end(0.01)


def test_no_such_program_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemCallError, match="cannot start the job"):
        children.Child("the job", ["/absent/program"], tmp_path / "log")


# --------------------------------------------------------------------------- interrupts


def test_a_signal_raises_with_the_shells_exit_code_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts(), pytest.raises(Interrupted) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_held_signal_waits_for_the_end_of_the_block() -> None:
    steps = []

    def held_twice(interrupts: Interrupts) -> None:
        with interrupts.hold():
            with interrupts.hold():
                os.kill(os.getpid(), signal.SIGINT)
            steps.append("finished")

    with Interrupts() as interrupts, pytest.raises(Interrupted):
        held_twice(interrupts)
    assert steps == ["finished"]


def test_further_signals_do_not_disturb_the_undoing() -> None:
    steps = []

    def interrupted(interrupts: Interrupts) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            with interrupts.hold():
                os.kill(os.getpid(), signal.SIGTERM)
            steps.append("undone")

    with Interrupts() as interrupts, pytest.raises(Interrupted):
        interrupted(interrupts)
    assert steps == ["undone"]


# --------------------------------------------------------------------------- disk, data


def test_a_disk_that_the_kernel_does_not_slow_down_is_found_out() -> None:
    for slow in (volume.Speed(2999.0, 3010.0), volume.Speed(200.0, 180.0)):
        assert volume.too_fast(slow) == ""
    for fast in (volume.Speed(60_000.0, 3000.0), volume.Speed(3000.0, 9000.0)):
        assert "does not keep the limit" in volume.too_fast(fast)


def test_disk_statistics_are_read_in_bytes() -> None:
    text = "  146137  80856 3041592  190846  95887 123564 4019040 492536  1  89844  726319\n"
    found = legs.parse_disk_stat(text)
    assert found == legs.DiskIo(146_137, 3_041_592 * 512, 190_846, 4_019_040 * 512)
    for bad in ("", "1 2 3", "a b c d e f g"):
        with pytest.raises(SystemCallError):
            legs.parse_disk_stat(bad)


SUMMARY = {
    "elapsed_s": 9.0,
    "anon_peak_bytes": GIB,
    "page_in_bytes": 400,
    "page_out_bytes": 500,
    "page_in_us_p50": 30.0,
    "page_in_us_p99": 90.0,
    "page_in_staging_bytes": 5,
    "page_in_backup_bytes": 20,
    "page_in_backup_why": {"quicker": 8, "measured": 2, "error": 10},
    "other_swap_bytes": 1,
    "far": None,
}


@pytest.mark.parametrize(("far", "out_bytes"), [(None, 0), ({"out_bytes": 480}, 480)])
def test_a_leg_has_the_figures_of_its_runs_summary(far: object, out_bytes: int) -> None:
    leg = legs.measured(Leg(FAR, "far memory", GIB // 2), {**SUMMARY, "far": far})
    assert (leg.elapsed_s, leg.limit_bytes, leg.far_out_bytes) == (9.0, GIB // 2, out_bytes)
    assert (leg.page_in_bytes, leg.page_out_bytes, leg.other_swap_bytes) == (400, 500, 1)
    assert (leg.page_in_disk_bytes, leg.page_in_chosen_bytes) == (20, 10)


def test_a_summary_that_lacks_a_figure_is_refused() -> None:
    for name in SUMMARY:
        rest = {key: value for key, value in SUMMARY.items() if key != name}
        with pytest.raises(SystemCallError, match=f"has no '{name}'"):
            legs.measured(Leg(FAR, "far memory"), rest)


def test_a_data_set_counts_only_when_it_is_whole(tmp_path: Path) -> None:
    assert not data.is_complete(tmp_path)
    for path in data.files(tmp_path):
        assert not data.is_complete(tmp_path)
        path.touch()
    assert data.is_complete(tmp_path)


def test_digests_tell_files_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    found = legs.digests(tmp_path)
    assert list(found) == ["a", "b"]
    assert found["a"] != found["b"]
    with pytest.raises(SystemCallError):
        legs.digests(tmp_path / "absent")
