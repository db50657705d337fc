# SPDX-License-Identifier: Apache-2.0
"""systemd units: what stands in them, and what install and uninstall do below a root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.machine.ran import ran

from infiniswap import errors, own_code
from infiniswap.cli import service
from infiniswap.cli.common import declared_devices
from infiniswap.cli.main import build_parser, main
from infiniswap.errors import ConflictError, NotPermittedError, UsageError
from infiniswap.planning import history
from infiniswap.planning.prediction import Measured
from infiniswap.rights import DONOR_USER, device_capabilities
from infiniswap.system import programs, service_units, systemd
from infiniswap.system.programs import Done
from infiniswap.system.service_units import DAEMON_UNIT, DEVICE_UNIT, UNIT_DIR, UNITS

COMMAND = ("/opt/isw/bin/infiniswap",)


def settings(name: str, command: tuple[str, ...] = COMMAND) -> dict[str, list[str]]:
    """Values by key, comments left out; a key of several sections does not occur."""
    found: dict[str, list[str]] = {}
    for line in service_units.render(name, command).splitlines():
        if line and line[0] not in "#[":
            key, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(key, []).append(value)
    return found


# ------------------------------------------------------------------------- contents


@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_filled_in_and_marked(name: str) -> None:
    text = service_units.render(name, COMMAND)
    assert "@INFINISWAP@" not in text
    assert "@MARK@" not in text
    assert text.splitlines()[0] == f"# {service_units.MARK}"
    found = settings(name)
    assert found["Type"] == ["notify"]
    assert found["LimitMEMLOCK"] == ["infinity"]
    assert found.get("LimitRTPRIO") == (["1"] if "device" in name else None)
    assert not {"LimitRTPRIO", "RestrictRealtime"} <= found.keys()
    assert found["LimitCORE"] == ["1" if "device" in name else "0"]
    assert found["ExecStart"][0].startswith(COMMAND[0] + " ")


def test_nothing_makes_a_mount_name_space_for_a_device() -> None:
    """A mount made in one is invisible to the host and gone with the process."""
    prefixes = ("Protect", "Private", "ReadOnly", "ReadWrite", "Inaccessible", "Bind", "Temporary")
    found = settings(DEVICE_UNIT)
    assert [key for key in found if key.startswith(prefixes)] == ["ProtectClock"]
    assert "LoadCredential" not in found


@pytest.mark.parametrize("name", UNITS)
def test_no_unit_hides_what_it_reads_of_proc(name: str) -> None:
    """/proc/meminfo, /proc/swaps and /proc/pressure are not there with ProcSubset=pid."""
    assert "ProcSubset" not in settings(name)


def test_the_daemon_has_a_user_and_no_capability() -> None:
    found = settings(DAEMON_UNIT)
    assert found["User"] == [DONOR_USER]
    assert found["CapabilityBoundingSet"] == [""]
    assert not {"AmbientCapabilities", "PermissionsStartOnly"} & found.keys()
    # Only what prepares and clears up is root's.
    for key in ("ExecStart", "ExecStartPre", "ExecStopPost", "ExecReload"):
        for line in found[key]:
            is_root = "--prepare" in line or "/bin/rm" in line
            assert (line.startswith("-+")) == is_root, line
            # Else its mount would be in a name space of its own.
            assert ("/usr/bin/nsenter --target 1 --mount -- " in line) == ("--prepare" in line)


@pytest.mark.parametrize(
    ("release", "version", "has"),
    [("5.14.0-1", 2, True), ("6.12.9", 2, True), ("5.13.9", 2, False), ("6.12.9", 1, False)],
)
def test_whether_the_kernel_can(tmp_path: Path, release: str, version: int, has: bool) -> None:
    proc = tmp_path / "proc"
    (proc / "sys/kernel").mkdir(parents=True)
    (proc / "sys/kernel/osrelease").write_text(release)
    (proc / "self").mkdir()
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
        kind, options, cgroups = "cgroup2", "rw", "0::/\n"
    else:
        kind, options, cgroups = "cgroup", "rw,memory", "1:memory:/\n"
    line = f"30 20 0:25 / {tmp_path} rw - {kind} cgroup {options}\n"
    (proc / "self/mountinfo").write_text(line)
    (proc / "self/cgroup").write_text(cgroups)
    assert service_units.has_cgroup_kill(proc=proc) == has


@pytest.mark.requires_tool("systemd-analyze")
@pytest.mark.parametrize(("name", "exposure_max"), [(DAEMON_UNIT, 30), (DEVICE_UNIT, 50)])
def test_what_systemd_says_of_the_rights(tmp_path: Path, name: str, exposure_max: int) -> None:
    """In tenths: 3.0 and 5.0. Its own tool ends with an error above a threshold."""
    path = tmp_path / name.replace("@", "@x")
    fewest = device_capabilities(cgroup_kill=True, systemd_cgroups=True)
    path.write_text(service_units.render(name, ("/usr/bin/true",), capabilities=fewest))
    done = ran(
        *("systemd-analyze", "security", "--no-pager", "--offline=true"),
        *(f"--threshold={exposure_max}", path),
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at a file (before 250)")
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if "✓" not in line
    )


@pytest.mark.parametrize("name", UNITS)
def test_what_has_an_exit_code_of_its_own_is_meant_by_it(name: str) -> None:
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.InfiniswapError)
    }
    (prevented,) = settings(name)["RestartPreventExitStatus"]
    assert {int(code) for code in prevented.split()} <= codes
    assert str(errors.NoDonorError.exit_code) not in prevented.split()
    # Slabs of devices that speak an older protocol do not go away by trying again.
    assert str(errors.ConflictError.exit_code) in prevented.split()


@pytest.mark.parametrize(
    ("unit", "has", "lacks"),
    [
        # A device is never killed.
        (
            DEVICE_UNIT,
            {"KillMode": "mixed", "SendSIGKILL": "no", "OOMScoreAdjust": "-1000"},
            # Default dependencies are what ends it at a shutdown.
            ("WatchdogSec", "FinalKillSignal", "KillSignal", "DefaultDependencies"),
        ),
        # The process that gives the memory back outlives the daemon.
        (DAEMON_UNIT, {"KillMode": "process", "Restart": "on-failure"}, ()),
    ],
)
def test_how_a_unit_ends(unit: str, has: dict[str, str], lacks: tuple[str, ...]) -> None:
    found = settings(unit)
    assert {key: found[key] for key in has} == {key: [value] for key, value in has.items()}
    assert not found.keys() & set(lacks)


def test_a_device_stops_before_the_network_and_the_daemon_is_watched() -> None:
    after = " ".join(settings(DEVICE_UNIT)["After"]).split()
    assert {"network.target", "network-online.target"} <= set(after)
    assert int(settings(DAEMON_UNIT)["WatchdogSec"][0]) >= 30


def test_the_command_of_the_device_unit_parses() -> None:
    (line,) = settings(DEVICE_UNIT)["ExecStart"]
    options = "--size 8G --donors 10.0.0.2,10.0.0.3 --swap"
    words = line.replace("%i", "swap0").replace("$DEVICE_OPTIONS", options).split()[1:]
    args = build_parser("device").parse_args(words)
    assert (args.action, args.name, args.foreground, args.swap) == ("start", "swap0", True, True)
    found = settings(DAEMON_UNIT)
    for line in (*found["ExecStart"], *found["ExecStartPre"], found["ExecReload"][0]):
        words = line.split("infiniswap ", 1)[1].split()
        args = build_parser("daemon").parse_args(words)
        assert (args.command, args.copies) == ("daemon", Path("/", service_units.COPIES_DIR))
        assert args.prepare == (DONOR_USER if "+" in line else None)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("/usr/bin/infiniswap", "/usr/bin/infiniswap"),
        ("/opt/50%/x", "/opt/50%%/x"),
        ("/opt/$HOME/x", "/opt/$$HOME/x"),
        ("/opt/a b", '"/opt/a b"'),
        ('/opt/"q"\\', '"/opt/\\"q\\"\\\\"'),
        ("", '""'),
    ],
)
def test_quoting(word: str, wanted: str) -> None:
    assert service_units.quote(word) == wanted


def test_a_path_with_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError):
        service_units.quote("/opt/x\nExecStartPre=/bin/rm")


def test_a_program_whose_path_needs_quotes() -> None:
    (line,) = settings(DAEMON_UNIT, ("/opt/a b/infiniswap",))["ExecStart"]
    assert line.startswith('/usr/bin/env "/opt/a b/infiniswap" daemon ')


@pytest.mark.requires_tool("systemd-analyze")
@pytest.mark.parametrize("directory", ["plain", "with space", "5% & $HOME"])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, directory: str) -> None:
    program = tmp_path / directory / "infiniswap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    files = []
    for name in (*UNITS, service_units.device_unit("swap0.a-b_c")):
        template = DEVICE_UNIT if name not in UNITS else name
        file = tmp_path / name
        file.write_text(service_units.render(template, (str(program),)))
        files.append(file)
    done = ran("systemd-analyze", "verify", "--man=no", *files)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "infiniswap" in line]
    assert (done.returncode, said) == (0, []), done.stderr


@pytest.mark.requires_tool("systemctl")
def test_a_declared_device_that_is_enabled_comes_up_at_boot(root: Path) -> None:
    """By systemctl itself, in a system that does not run."""
    assert call("install", root) == 0
    devices = [declared_devices.Declaration(root / "etc/infiniswap/devices/swap0.env")]
    unit = service_units.device_unit("swap0")
    (note,) = declared_devices.boot_notes(devices, root)
    assert unit.removesuffix(".service") in note
    assert ran("systemctl", f"--root={root}", "enable", DAEMON_UNIT, unit).returncode == 0
    wants = root / UNIT_DIR / "multi-user.target.wants"
    assert {path.name for path in wants.iterdir()} == {DAEMON_UNIT, unit}
    assert list(declared_devices.boot_notes(devices, root)) == []
    assert call("uninstall", root) == 0
    assert files_below(root) == []


# --------------------------------------------------------------- install, uninstall


def call(action: str, root: Path | None = None, *words: str) -> int:
    below = [] if root is None else ["--root", str(root)]
    return main(["service", action, *below, *words])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir() or path.is_symlink())


def test_install_writes_the_units_and_says_what_comes_next(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("install", root) == 0
    said = capsys.readouterr().out
    assert files_below(root) == sorted(root / UNIT_DIR / name for name in UNITS)
    for name in UNITS:
        path = root / UNIT_DIR / name
        assert path.stat().st_mode & 0o777 == 0o644
        assert path.read_text() == service_units.render(name, service.command())
        assert f"wrote: {path}" in said
    assert "systemctl enable --now infiniswapd" in said
    assert "systemctl enable --now infiniswap-device@NAME" in said
    assert "usermod -aG infiniswap USER" in said
    assert "useradd --system --user-group --no-create-home --home-dir /var/lib/infiniswapd " in said
    assert f"{DONOR_USER}\n" in said


def test_install_twice_changes_nothing_and_mends_what_is_old(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("install", root)
    path = root / UNIT_DIR / DAEMON_UNIT
    before = path.stat().st_mtime_ns
    capsys.readouterr()
    assert call("install", root) == 0
    assert path.stat().st_mtime_ns == before
    assert f"unchanged: {path}" in capsys.readouterr().out
    path.write_text(f"# {service_units.MARK}\n[Unit]\n")
    assert call("install", root) == 0
    assert f"wrote: {path}" in capsys.readouterr().out
    assert path.read_text() == service_units.render(DAEMON_UNIT, service.command())


@pytest.mark.parametrize("word", ["--dry-run", "--print"])
def test_what_only_shows_writes_nothing(
    root: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("install", root, word) == 0
    assert files_below(root) == []
    assert str(UNIT_DIR / DEVICE_UNIT) in capsys.readouterr().out


def test_uninstall_leaves_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("install", root)
    directory = root / UNIT_DIR
    wants = directory / "multi-user.target.wants"
    wants.mkdir()
    for name in (DAEMON_UNIT, service_units.device_unit("swap0")):
        (wants / name).symlink_to(directory / name)
    other = directory / "network-online.target.wants" / "other.service"
    other.parent.mkdir()
    other.symlink_to("/dev/null")
    assert call("uninstall", root, "--dry-run") == 0
    assert len(files_below(root)) == 5
    assert call("uninstall", root) == 0
    assert files_below(root) == [other]
    assert not wants.exists()
    capsys.readouterr()
    assert call("uninstall", root) == 0
    assert "no units of Infiniswap" in capsys.readouterr().out


def test_purge_removes_what_the_configuration_names_beside_it_and_nothing_elsewhere(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    etc, elsewhere = root / "etc/infiniswap", root / "etc/ssl"
    for directory in (etc / "certs", elsewhere, root / "var/lib/infiniswap/mine"):
        directory.mkdir(parents=True)
    (etc / "link").symlink_to(elsewhere)
    inside = [etc / "token", etc / "certs/ca.pem"]
    outside = [root / "etc/peers", elsewhere / "cert.pem", elsewhere / "key.pem"]
    for path in (*inside, *outside):
        path.touch()
    (etc / "password").symlink_to(elsewhere / "key.pem")
    config = etc / "infiniswap.toml"
    text = (
        '[cluster]\nmetrics_token_file = "/etc/infiniswap/token"\npeers_file = "/etc/peers"\n'
        'secret_file = "/etc/infiniswap/not-there"\n'
        '[mqtt]\ntls = "on"\nusername = "u"\npassword_file = "/etc/infiniswap/password"\n'
        'ca_file = "/etc/infiniswap/certs/ca.pem"\ncert_file = "/etc/infiniswap/link/cert.pem"\n'
        'key_file = "/etc/infiniswap/../ssl/key.pem"\n'
    )
    config.write_text(text + "broker = 7\n")
    assert call("uninstall", root, "--purge", "--dry-run") == 0
    assert "mqtt.broker" in capsys.readouterr().err, "what a broken file names is not known"
    config.write_text(text)
    assert call("uninstall", root, "--purge", "--dry-run") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert f"would remove: {inside[0]}" in said.out
    assert call("uninstall", root, "--purge") == 0
    assert files_below(root) == sorted([*outside, etc / "link"])
    assert not (etc / "certs").exists()
    assert (root / "var/lib/infiniswap/mine").is_dir(), "an empty directory that is not ours"
    said = capsys.readouterr()
    assert f"not name them: link in {etc}; remove" in said.out
    assert f"not name them: mine in {root}/var/lib/infiniswap; remove" in said.out
    assert "uninstall --purge" not in said.out


def test_purge_removes_plans_figures_and_half_written_files(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = root / "var/lib/infiniswapd"
    history.add(history.path_in(state), Measured(1.0, 2.0))
    for name in (".plan-history.json.4711", ".host-secret.0a1b2c3d", ".donor.crt.abc"):
        (state / name).touch()
    assert call("uninstall", root, "--purge") == 0
    assert not state.exists()
    assert "do not belong to Infiniswap" not in capsys.readouterr().out


def test_units_and_drop_ins_of_others_stay(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = root / UNIT_DIR
    directory.mkdir(parents=True)
    own = directory / DAEMON_UNIT
    own.write_text("[Unit]\n")
    drop_in = directory / (DEVICE_UNIT + ".d")
    drop_in.mkdir()
    assert call("install", root) == ConflictError.exit_code
    assert "systemctl edit" in capsys.readouterr().err
    assert files_below(root) == [own]
    assert call("uninstall", root) == 0
    assert files_below(root) == [own]
    assert (
        f"left in place, because Infiniswap did not write it: {drop_in}" in capsys.readouterr().out
    )


def test_a_root_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("install", tmp_path / "no") == UsageError.exit_code
    assert "no such directory" in capsys.readouterr().err


def test_without_systemd_it_says_what_can_be_done_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(systemd, "is_running", lambda: False)
    for action in ("install", "uninstall"):
        assert call(action) == errors.UnavailableError.exit_code
        said = capsys.readouterr().err
        assert "--print" in said
        assert "--root DIR" in said
        assert "--foreground" in said


def test_uninstall_is_refused_while_something_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {
        "infiniswap-device@a.service": "deactivating",
        "infiniswap-device@b.service": "failed",
    }
    monkeypatch.setattr(systemd, "is_running", lambda: True)
    monkeypatch.setattr(systemd, "units", lambda *_: states)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(service, "_root", lambda _args: root)
    assert call("uninstall") == ConflictError.exit_code
    said = capsys.readouterr().err
    assert "systemctl disable --now infiniswap-device@a.service" in said
    assert "@b" not in said


def on_this_host(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, has_user: bool
) -> list[tuple[str, ...]]:
    """Commands that would change this host."""
    ran_here: list[tuple[str, ...]] = []
    monkeypatch.setattr(systemd, "is_running", lambda: True)
    monkeypatch.setattr(systemd, "units", lambda *_: {})
    monkeypatch.setattr(systemd, "reload", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(service, "_root", lambda _args: root)
    monkeypatch.setattr(service, "_check_readable", lambda: None)
    monkeypatch.setattr(service, "_group_exists", lambda: True)
    monkeypatch.setattr(service, "_remove_group", lambda **_: None)
    monkeypatch.setattr(service, "check_own_code", lambda *_, **__: None)
    monkeypatch.setattr(service, "user_number", lambda _name: 990 if has_user else None)
    monkeypatch.setattr(service, "run_command", lambda argv: ran_here.append(tuple(argv)))
    return ran_here


def test_install_makes_the_daemons_user_and_a_purge_removes_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = on_this_host(root, monkeypatch, has_user=False)
    assert call("install", None, "--dry-run") == 0
    assert f"would make the user {DONOR_USER}" in capsys.readouterr().out
    assert commands == []
    assert call("install") == 0
    assert [(argv[0], argv[-1]) for argv in commands] == [("useradd", DONOR_USER)]
    commands = on_this_host(root, monkeypatch, has_user=True)
    assert call("install") == 0
    assert call("uninstall") == 0
    assert f"the user {DONOR_USER} is left in place" in capsys.readouterr().out
    assert commands == []
    assert call("uninstall", None, "--purge", "--dry-run") == 0
    assert commands == []
    assert call("uninstall", None, "--purge") == 0
    assert commands == [("userdel", DONOR_USER)]


def test_an_installation_that_the_daemons_user_cannot_read_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = service._check_readable
    commands = on_this_host(root, monkeypatch, has_user=False)
    monkeypatch.setattr(service, "_check_readable", check)
    closed = root.parent / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(service, "code_paths", lambda: (closed,))
    assert call("install") == ConflictError.exit_code
    assert f"the daemon runs as the user {DONOR_USER}" in capsys.readouterr().err
    assert (files_below(root), commands) == ([], [])


def test_an_installation_that_others_can_change_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where sudo says whose it is: systemd is nobody's sudo."""
    commands = on_this_host(root, monkeypatch, has_user=False)
    monkeypatch.setattr(service, "check_own_code", own_code.check_own_code)
    monkeypatch.setattr(service, "trusted_users", lambda _environ: {12345})
    assert call("install") == NotPermittedError.exit_code
    assert "root would run code that others can change" in capsys.readouterr().err
    assert (files_below(root), commands) == ([], [])


def test_the_list_of_units_is_understood() -> None:
    text = (
        "  infiniswapd.service           loaded active running Infiniswap donor\n"
        "● infiniswap-device@a.service   loaded failed failed  Infiniswap device a\n"
        "infiniswap-device@b.service     loaded inactive dead  Infiniswap device b\n"
    )
    assert systemd.parse_units(text) == {
        "infiniswapd.service": "active",
        "infiniswap-device@a.service": "failed",
        "infiniswap-device@b.service": "inactive",
    }


@pytest.mark.parametrize("said", ["stopping", "running", "degraded", "offline"])
def test_a_shutdown_of_the_host_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(systemd, "finish", lambda _argv: Done(1, f"{said}\n", ""))
    assert not systemd.is_stopping(tmp_path)  # no systemd
    (tmp_path / "run" / "systemd" / "system").mkdir(parents=True)
    assert systemd.is_stopping(tmp_path) == (said == "stopping")


def test_a_systemd_that_cannot_be_asked_is_not_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(_argv: list[str]) -> Done:
        raise programs.missing("systemctl")

    monkeypatch.setattr(systemd, "finish", finish)
    (tmp_path / "run" / "systemd" / "system").mkdir(parents=True)
    assert not systemd.is_stopping(tmp_path)


def test_this_very_installation_is_what_the_units_run() -> None:
    words = service.command()
    assert os.path.isabs(words[0])
    assert ran(*words, "--version").stdout.startswith("infiniswap ")
