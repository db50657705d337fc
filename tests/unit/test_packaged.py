# SPDX-License-Identifier: Apache-2.0
"""What the Debian package's scripts ask of the code before they remove it."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.machine.ran import ran

from infiniswap.cli import service
from infiniswap.cli.main import main
from infiniswap.cli.service import packaged
from infiniswap.code_versions import MARKER, CodeProcess
from infiniswap.errors import ConflictError, UsageError
from infiniswap.system import swap
from infiniswap.system.service_units import DAEMON_UNIT, PACKAGE_UNIT_DIR, UNIT_DIR


@pytest.fixture(autouse=True)
def no_areas_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roots here are the tests' own; other tests may have swap areas at the same time."""
    monkeypatch.setattr(swap, "active_areas", lambda: ())


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_lent_slabs_keep_the_package(tmp_path: Path) -> None:
    slabs = tmp_path / "run/infiniswapd/4abe80c2-6fb0-571a-b8a8-ee32623e89ea/slabs"
    made(slabs / "slab.3.free")
    packaged.leave(tmp_path)
    made(slabs / "slab.4.mapped.1.0.7.99")
    with pytest.raises(ConflictError, match="lends 1 slab,") as caught:
        packaged.leave(tmp_path)
    assert "infiniswap donor drain" in caught.value.mend


def test_a_device_that_runs_keeps_the_package(tmp_path: Path) -> None:
    lock = made(tmp_path / "run/infiniswap/one/lock")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="devices run: one") as caught:
            packaged.leave(tmp_path)
        assert "infiniswap device stop one" in caught.value.mend
    packaged.leave(tmp_path)


def process(*words: str, unit: str = "session-1.scope") -> CodeProcess:
    return CodeProcess(4711, words, Path("/usr/lib/infiniswap/1"), unit)


def test_so_does_any_other_process_that_would_lose_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_processes", lambda: [process("python3", "daemon")])
    with pytest.raises(ConflictError, match=r"process 4711 runs code .*: python3 daemon") as caught:
        packaged.check_no_process()
    assert "kill 4711" in caught.value.mend
    ended = [process("python3", "daemon", unit=DAEMON_UNIT), process("python3", "--release")]
    monkeypatch.setattr(packaged, "_processes", lambda: ended)
    packaged.check_no_process()


def test_what_a_purge_removes_is_written_down_and_links_that_enable_units_go(
    tmp_path: Path,
) -> None:
    config = made(tmp_path / "etc/infiniswap/infiniswap.toml")
    config.write_text(
        '[cluster]\nsecret_file = "/etc/infiniswap/keys/secret"\n'
        '[device]\nbackup_dir = "/srv/backups"\n'
    )
    ours = [
        config,
        made(tmp_path / "etc/infiniswap/keys/secret"),
        made(tmp_path / "etc/infiniswap/devices/one.env"),
        made(tmp_path / "srv/backups/one.backup"),
        made(tmp_path / "var/lib/infiniswapd/donor.pem"),
    ]
    ours[1].chmod(0o600)
    others = [made(tmp_path / "etc/infiniswap/notes"), made(tmp_path / "srv/backups/film.mkv")]
    link = tmp_path / UNIT_DIR / "multi-user.target.wants" / DAEMON_UNIT
    link.parent.mkdir(parents=True)
    link.symlink_to("/nowhere")
    (tmp_path / "run/infiniswapd/local").mkdir(parents=True)
    packaged.leave(tmp_path)
    assert list((tmp_path / "run").iterdir()) == []
    assert not link.is_symlink()
    lines = (tmp_path / packaged.PURGE_LIST).read_text().splitlines()
    assert set(map(str, ours)) <= set(lines)
    assert not set(map(str, others)) & set(lines)
    # A directory comes after what is in it.
    for index, line in enumerate(lines):
        if line.endswith("/"):
            assert not any(later.startswith(line) for later in lines[index + 1 :]), line


@pytest.mark.parametrize("argv", [[], ["sweep", "now"], ["nonsense"], ["sweep"]])
def test_whoever_calls_it_by_hand_is_told(argv: list[str]) -> None:
    """`sweep` in an installation that is not the package's, as here."""
    assert packaged.main(argv) == UsageError.exit_code


# ------------------------------------------------------------- beside another installation


def test_units_of_a_second_installation_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / PACKAGE_UNIT_DIR / DAEMON_UNIT)
    code = main(["service", "install", "--root", str(tmp_path)])
    assert code == ConflictError.exit_code
    assert "apt remove infiniswap" in capsys.readouterr().err
    assert not (tmp_path / UNIT_DIR).exists()
    assert main(["service", "install", "--print"]) == 0


@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_the_packages_own_command_leaves_its_units_to_it(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "packaged_in", lambda: Path("/usr/lib/infiniswap"))
    assert main(["service", action]) == ConflictError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert f"`infiniswap service {action}` has nothing to do" in said
    assert "apt purge infiniswap" in said


# ------------------------------------------------------------------------- shell scripts


Script = Callable[[str, str], tuple[int, str]]


@pytest.fixture
def script(tmp_path: Path, project_root: Path) -> Script:
    """Runs a maintainer script with its paths below a directory of the test's."""

    def run(name: str, action: str) -> tuple[int, str]:
        text = (project_root / "tools/deb_package/scripts" / name).read_text()
        for top in ("/etc/", "/usr/lib/infiniswap", "/usr/local", "/var/lib/", "/run/"):
            text = text.replace(top, f"{tmp_path}{top}")
        path = tmp_path / name
        path.write_text(text.replace("@RELEASE@", "12"))
        done = ran("sh", path, action)
        return done.returncode, " ".join(done.stderr.split())

    return run


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ('PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nID=debian\n', ""),
        ('PRETTY_NAME="Debian GNU/Linux forky/sid"\nID=debian\n', ""),
        (
            'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_ID="13"\nID=debian\n',
            "Take the package whose version ends in ~deb13",
        ),
        (
            'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nVERSION_ID="24.04"\nID=ubuntu\n',
            "this host is Ubuntu 24.04.1 LTS",
        ),
    ],
)
def test_another_system_than_the_packages_is_refused(
    script: Script, tmp_path: Path, release: str, said: str
) -> None:
    made(tmp_path / "etc/os-release").write_text(release)
    code, text = script("preinst", "install")
    assert (code, said in text) == (1 if said else 0, True), text
    assert bool(text) == bool(said)


def test_units_of_another_installation_stop_the_package(script: Script, tmp_path: Path) -> None:
    unit = made(tmp_path / "etc/systemd/system" / DAEMON_UNIT)
    assert script("preinst", "install") == (0, "")  # an administrator's own
    root = tmp_path / "other"
    root.mkdir()
    assert main(["service", "install", "--root", str(root)]) == 0
    unit.write_text((root / UNIT_DIR / DAEMON_UNIT).read_text())
    code, text = script("preinst", "upgrade")
    assert (code, "infiniswap service uninstall" in text) == (1, True)


def test_a_removal_that_python_cannot_check_is_refused_while_code_runs(
    script: Script, tmp_path: Path
) -> None:
    top = tmp_path / "usr/lib/infiniswap"
    python = made(top / "current/bin/python3")
    made(top / "current" / MARKER)
    python.write_text("#!/bin/sh\nexit $(cat $0.code)\n")
    python.chmod(0o755)
    for result, expected in ((0, 0), (9, 1), (8, 1), (1, 0)):  # 1: it could not be asked
        python.with_name("python3.code").write_text(str(result))
        assert script("prerm", "remove") == (expected, ""), result
    assert script("prerm", "upgrade") == (0, "")
    program = top / "1/bin/sleep"
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:  # it has begun when this returns
        code, text = script("prerm", "remove")
        process.kill()
    assert (code, "runs code of this package" in text) == (1, True)
