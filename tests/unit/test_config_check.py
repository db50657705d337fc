# SPDX-License-Identifier: Apache-2.0
"""`infiniswap config check` and `infiniswap init`."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from infiniswap import config as configuration
from infiniswap.cli import init
from infiniswap.cli.common import declared_devices
from infiniswap.cli.main import main
from infiniswap.device.spec.rundir import paths_of
from infiniswap.errors import ConfigError, ConflictError, UsageError
from infiniswap.system import service_units
from infiniswap.system.memory import host_memory
from infiniswap.units import PAGE_BYTES

Check = Callable[[str], tuple[int, str]]

GOOD = """[daemon]
run_dir = "{0}/daemon"
state_dir = "{0}/state"
[device]
run_dir = "{0}/run"
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in configuration.known_keys():
        monkeypatch.delenv(configuration.env_name(key), raising=False)
    monkeypatch.delenv("INFINISWAP_CONFIG", raising=False)


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit code and words of `config check` for a file of that text."""

    def checked(text: str) -> tuple[int, str]:
        path = tmp_path / "infiniswap.toml"
        path.write_text(text)
        code = main(["config", "check", str(path)])
        said = capsys.readouterr()
        return code, (said.out + said.err).replace(str(path), "FILE")

    return checked


def test_every_mistake_is_named_with_line_and_remedy(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINISWAP_DAEMON_POOOL", "1G")
    text = '[daemon]\nslb = "1G"\npool = "x"\n\n[deamon]\n[device]\nqueues = 99\n'
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert "FILE, line 2: unknown key daemon.slb. The nearest known key is daemon.slab." in said
    assert "FILE, line 3: daemon.pool: 'x' is not a size. Write a number" in said
    assert "FILE, line 5: unknown section [deamon]. The nearest known section is daemon." in said
    assert "FILE, line 7: device.queues: 99 is out of range. It must be at least 1" in said
    assert "environment: unknown variable INFINISWAP_DAEMON_POOOL. The nearest" in said
    assert "FILE: 5 mistakes" in said


def test_values_that_do_not_go_together_are_all_named(check: Check) -> None:
    text = '[daemon]\npool = "512M"\nconnections_max = 1\n[device]\nstaging = "1M"\n'
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert "daemon.pool (512M) is smaller than one slab (1G)" in said
    assert "daemon.connections_per_lease_max is above daemon.connections_max" in said
    assert said.count("is more than half of device.staging") == 2


@pytest.mark.parametrize("text", ["[daemon", "slab = 1", "\x00"])
def test_a_file_that_is_none(check: Check, text: str) -> None:
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert "FILE: one mistake" in said


def test_a_file_that_is_not_there_however_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "infiniswap.toml")
    assert main(["config", "check", path]) == ConfigError.exit_code
    said = capsys.readouterr()
    assert "no such configuration file" in said.err
    assert main(["config", "check", "--config", path]) == ConfigError.exit_code
    assert capsys.readouterr() == said
    assert main(["config", "check", "--config", path, path]) == UsageError.exit_code
    assert "two files" in capsys.readouterr().err


@pytest.mark.requires_root
def test_what_would_make_a_start_fail_is_a_mistake(tmp_path: Path, check: Check) -> None:
    assert check(GOOD.format(tmp_path))[0] == 0
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)
    (tmp_path / "file").touch()
    text = f"""[daemon]
listen = "10.0.0.2"
headroom = "1P"
run_dir = "{tmp_path}/file/daemon"
[device]
run_dir = "{tmp_path}/file"
backup_dir = "/proc/none"
[cluster]
secret_file = "{secret}"
"""
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert "chmod 600" in said
    assert "leave no room for a slab" in said
    assert f"daemon.run_dir ({tmp_path}/file/daemon): {tmp_path}/file is not a directory" in said
    assert f"device.run_dir ({tmp_path}/file)" in said
    assert "device.backup_dir (/proc/none) cannot hold backups" in said
    text = '[daemon]\nlisten = "10.0.0.2"\n' + GOOD.format(tmp_path).replace("[daemon]\n", "")
    assert "needs a cluster secret" in check(text)[1]


@pytest.mark.parametrize(
    ("text", "said_of_it"),
    [
        ('[daemon]\nlisten = "10.0.0.2:9401"\n', "daemon.data_port is 9401, which is the port of"),
        (
            '[daemon]\nlisten = "[::]:9402"\n[device]\nmetrics_listen = "10.0.0.2"\n',
            "device.metrics_listen (10.0.0.2:9402) has the port of daemon.listen",
        ),
        ('[daemon]\nlisten = "10.91.7.300"\n', "daemon.listen: '10.91.7.300' is not an address"),
        ('[cluster]\npeers = ["fe80::1"]\n', "cluster.peers: 'fe80::1' is a link-local address"),
        (f'[device]\nrun_dir = "/{"r" * 125}"\n', "device.run_dir is 34 bytes too long"),
    ],
)
def test_addresses_that_cannot_work_are_mistakes(check: Check, text: str, said_of_it: str) -> None:
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert said_of_it in said
    assert "FILE: one mistake" in said


def test_the_longest_run_directory_that_works_is_accepted() -> None:
    path = Path("/" + "r" * 91)
    configuration.load(Path("/dev/null"), {"device.run_dir": path}, {})
    paths_of("n", path, Path("/b"))
    with pytest.raises(ConfigError, match=r"is 1 byte too long"):
        configuration.load(Path("/dev/null"), {"device.run_dir": path.with_name("r" * 92)}, {})
    with pytest.raises(UsageError, match="longer than 107 bytes"):
        paths_of("n", path.with_name("r" * 92), Path("/b"))


@pytest.mark.requires_root
def test_an_address_of_another_host_is_a_mistake(tmp_path: Path, check: Check) -> None:
    text = '[daemon]\nlisten = "192.0.2.7"\n' + GOOD.format(tmp_path).replace("[daemon]\n", "")
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert "daemon.listen = 192.0.2.7:9400: no interface of this host has it. Give an" in said


@pytest.mark.requires_root
def test_slabs_of_daemon_and_devices_must_not_differ(tmp_path: Path, check: Check) -> None:
    text = '[daemon]\nslab = "64M"\n' + GOOD.format(tmp_path).replace("[daemon]\n", "")
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert "daemon.slab (64M) and device.slab (1G) differ" in said
    assert check(text.replace("[device]", '[device]\nslab = "64M"'))[0] == 0


@pytest.mark.requires_root
def test_declared_devices_are_checked_with_it(tmp_path: Path, check: Check) -> None:
    directory = tmp_path / "devices"
    directory.mkdir()
    said_of = {
        "good": ("--size 64M --donors 10.0.0.2 --backup /dev/null --swap",),
        "option": ("'--size 64M --speed 9'", "line 2: .*--speed"),
        "size": ("--size 1000", "--size: '1000' is not a multiple of a page"),
        "new": ("--swap", "--size is missing"),
        "bad name": ("--size 64M", "cannot be a device name"),
        "loss": ("--size 64M --backup none --swap", "--allow-data-loss"),
        "sise": ("--sise 64M --frontend ublq", r"no option --sise\. The nearest one is --size\."),
        "last": ("--frontend ublq --sise 64M", "--frontend: 'ublq' is not one of"),
        "three": (
            "--priority 99999 --size 1000 --slab lots",
            *("--priority 99999", "'1000'", r"device\.slab"),
        ),
    }
    for name, (options, *_) in said_of.items():
        (directory / f"{name}.env").write_text(f"# swap\nDEVICE_OPTIONS={options}\n")
    (directory / "directory.env").mkdir()
    code, said = check(GOOD.format(tmp_path))
    assert code == ConfigError.exit_code
    for name, (_, *mistakes) in {**said_of, "directory": ("", "Is a directory")}.items():
        lines = [line for line in said.splitlines() if f"/{name}.env" in line]
        assert len(lines) == len(mistakes), name
        assert all(re.search(mistake, "".join(lines)) for mistake in mistakes), lines


def test_a_declared_device_that_does_not_come_up_at_boot_is_told(tmp_path: Path) -> None:
    devices = [declared_devices.Declaration(Path(f"/x/{name}.env")) for name in ("a", "b")]
    assert list(declared_devices.boot_notes(devices, tmp_path)) == []
    directory = tmp_path / service_units.UNIT_DIR
    wants = directory / "multi-user.target.wants"
    wants.mkdir(parents=True)
    (directory / service_units.DEVICE_UNIT).touch()
    (wants / service_units.device_unit("a")).symlink_to(directory / service_units.DEVICE_UNIT)
    (note,) = declared_devices.boot_notes(devices, tmp_path)
    assert "systemctl enable infiniswap-device@b" in note


# ----------------------------------------------------------------------------- init


def test_init_writes_what_check_accepts_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "etc" / "infiniswap.toml"
    assert main(["init", "--config", str(path), "--donors", "10.0.0.2,10.0.0.3:9"]) == 0
    assert f"wrote: {path}" in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    text = path.read_text()
    assert 'peers = ["10.0.0.2:9400", "10.0.0.3:9"]' in text
    assert main(["config", "check", str(path)]) == 0, capsys.readouterr()
    path.write_text("[daemon]\n")
    assert main(["init", "--config", str(path)]) == ConflictError.exit_code
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "[daemon]\n"
    assert main(["init", "--config", str(path), "--force"]) == 0
    assert "[policy]" in path.read_text()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_init_that_only_shows_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "infiniswap.toml"
    (tmp_path / init.SECRET_FILE).write_text("0123456789abcdef")
    assert main(["init", "--config", str(path), "--print"]) == 0
    assert not path.exists()
    text = capsys.readouterr().out
    assert f'\nsecret_file = "{tmp_path}/secret"\n' in text
    path.write_text(text)
    assert configuration.load(path, environ={}).cluster.secret_file == tmp_path / "secret"


def test_a_pool_that_can_never_be_had_is_a_mistake_and_a_wide_one_a_note(
    tmp_path: Path, check: Check
) -> None:
    good = GOOD.format(tmp_path)

    def pool(size_bytes: int) -> tuple[int, str]:
        return check(good.replace("[daemon]\n", f"[daemon]\npool = {size_bytes}\n"))

    total_bytes = host_memory().total_bytes // PAGE_BYTES * PAGE_BYTES
    code, said = pool(1 << 60)
    assert code == ConfigError.exit_code
    assert "a pool of 1024P is more than the" in said
    code, said = pool(total_bytes)
    assert code == 0
    assert "but the headroom of" in said
    code, said = pool(total_bytes // 4 // PAGE_BYTES * PAGE_BYTES)
    assert code == 0
    assert "headroom" not in said


def test_a_broken_certificate_of_the_metrics_port_is_told(check: Check, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    text = GOOD.format(tmp_path)
    text += f'backup_dir = "{tmp_path}"\nmetrics_listen = "127.0.0.1:0"\n'
    code, said = check(text)
    assert (code, "needs a metrics token" in said) == (ConfigError.exit_code, True)
    text += f'[cluster]\nmetrics_token_file = "{token}"\n'
    assert "metrics port" not in check(text)[1]
    key = tmp_path / "metrics.pem"
    key.touch(0o600)
    key.write_text("x")
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert f"{key}: the certificate of the metrics port cannot be used" in said


def test_a_program_that_others_can_change_is_a_mistake(check: Check, tmp_path: Path) -> None:
    program = tmp_path / "latency"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o777)
    text = f'[daemon.slo]\ncommand = "{program}"\nbound = 1\n'
    code, said = check(text)
    assert code == ConfigError.exit_code
    assert f"others can change the program {program}" in said
    program.chmod(0o755)
    assert "others can change" not in check(text)[1]
