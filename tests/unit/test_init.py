# SPDX-License-Identifier: Apache-2.0
"""`infiniswap init`: what it asks this host, and where in the file the answers stand."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infiniswap import config as configuration
from infiniswap.cli import init, service
from infiniswap.cli.config.paths import existing
from infiniswap.cli.doctor import host
from infiniswap.cli.doctor.finding import missing
from infiniswap.cli.main import main
from infiniswap.config import DeviceConfig
from infiniswap.donor.memory import MemoryFigures, memory_source
from infiniswap.errors import BackupError, ConflictError, SystemCallError
from infiniswap.keys import Keys
from infiniswap.secret import read_secret
from infiniswap.system.backup import MEND
from infiniswap.system.storage import ONLY_COPY_ON_WRITE
from infiniswap.units import GIB, MIB, format_size_short


def comment(text: str, key: str) -> str:
    """What stands above a key, as one line."""
    lines = text.splitlines()
    (end,) = (at for at, line in enumerate(lines) if re.match(f"#?{key} = ", line))
    begin = end
    while lines[begin - 1].startswith("# "):
        begin -= 1
    return " ".join(line[2:] for line in lines[begin:end])


def test_the_file_says_what_this_host_is_above_the_keys_concerned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [
        SimpleNamespace(family=family, address=address)
        for family, of_family in (
            (socket.AF_INET, ("127.0.0.1", "10.1.2.3")),
            (socket.AF_INET6, ("fe80::1%eth0", "fd00::5")),
            (socket.AF_PACKET, ("aa:bb:cc:dd:ee:ff",)),
        )
        for address in of_family
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": addresses})
    text = init.compose(tmp_path / "infiniswap.toml")
    assert "Here: this host's addresses are 10.1.2.3, fd00::5." in comment(text, "listen")
    for finding in host.front_ends():
        assert f"Here: {finding.name}: {finding.what}" in comment(text, "frontend")
    total = format_size_short(memory_source(None).read().total_bytes)
    assert re.search(rf"Here: (up to .* of {total}\.|this host has no)", comment(text, "pool"))
    assert f"Here: {tmp_path}/secret does not exist yet" in comment(text, "secret_file")


def test_what_a_host_lacks_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[str]] = {}
    finding = missing("memory-cgroup", "none is mounted", "mount one")
    monkeypatch.setattr(host, "memory_cgroup", lambda: iter([finding]))
    init._capabilities(found)
    assert found["device"] == ["memory-cgroup: none is mounted. Mend: mount one"]
    assert found["device.transport"]


def memory(total_bytes: int) -> Callable[[], MemoryFigures]:
    return lambda: MemoryFigures(total_bytes, total_bytes)


@pytest.mark.parametrize(
    ("total_bytes", "slab", "lent"),
    [(64 * GIB, "", 56 * GIB), (GIB, '"64M"', 896 * MIB), (32 * MIB, '"4M"', 28 * MIB)],
)
def test_slabs_are_smaller_where_there_is_little_memory(
    total_bytes: int, slab: str, lent: int
) -> None:
    chosen: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    init._memory(chosen, found, memory(total_bytes))
    assert chosen == ({"daemon.slab": slab, "device.slab": slab} if slab else {})
    most, total = format_size_short(lent), format_size_short(total_bytes)
    assert found["daemon.pool"] == [f"up to {most} of {total}."]
    assert found["daemon.headroom"] == [f"{format_size_short(total_bytes // 8)}."]
    assert ("daemon.slab" in found) == bool(slab)


def test_a_host_without_memory_to_lend_or_to_read_is_told_so() -> None:
    def unreadable() -> MemoryFigures:
        raise SystemCallError("it is gone", where="/proc/meminfo")

    for read, said in ((memory(MIB), "no memory to lend"), (unreadable, "it is gone")):
        chosen: dict[str, str] = {}
        found: dict[str, list[str]] = {}
        init._memory(chosen, found, read)
        assert not chosen
        assert said in found["daemon.pool"][0]


def test_backups_go_to_the_first_disk_that_can_hold_them(tmp_path: Path) -> None:
    disks = [tmp_path / name for name in ("full", "good", "slow")]

    def asked(*able: Path) -> tuple[str | None, str]:
        """The place that is set, and what is said of it."""

        def check(path: Path, size_bytes: int) -> None:
            assert size_bytes
            if path.parent not in able:
                raise BackupError("it is in memory", mend=f"{MEND} {ONLY_COPY_ON_WRITE}")

        chosen: dict[str, str] = {}
        found: dict[str, list[str]] = {}
        init._backup(chosen, found, check, disks)
        return chosen.get("device.backup_dir"), found["device.backup_dir"][0]

    default = DeviceConfig().backup_dir
    place, said = asked(*disks[1:])
    assert place == f'"{disks[1]}/infiniswap"'
    assert f"{default} cannot hold backups (it is in memory)" in said
    place, said = asked()
    assert place is None
    assert "and no mounted disk can" in said
    assert ONLY_COPY_ON_WRITE in said
    place, said = asked(existing(default), *disks)
    assert place is None
    assert "free; a backup is as large" in said


def test_disks_are_what_block_devices_are_mounted_at(tmp_path: Path) -> None:
    for name in ("a disk", "größe", "memory"):
        (tmp_path / name).mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text(
        f"/dev/vda1 {tmp_path}/a\\040disk ext4 rw 0 0\n/dev/vdb {tmp_path}/größe xfs rw 0 0\n"
        f"tmpfs {tmp_path}/memory tmpfs rw 0 0\n/dev/vda2 /boot/efi vfat rw 0 0\n"
        f"/dev/vdc {tmp_path}/gone ext4 rw 0 0\n"
    )
    found = set(init._disks(tmp_path)) - {Path("/var/tmp")}
    assert found == {tmp_path / "a disk", tmp_path / "größe"}


def made(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code = main(["init", *argv])
    return f"{code} {capsys.readouterr()}"


def test_it_makes_a_secret_and_a_session_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "DEFAULT_PATH", tmp_path / "none.toml")
    secret, key = tmp_path / "etc" / "secret", tmp_path / "session-key"
    assert made(capsys, "--secret", str(secret)).startswith("0 ")
    keys = read_secret(secret)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "exists already" in made(capsys, "--secret", str(secret))
    assert read_secret(secret) == keys
    assert "no cluster secret is configured" in made(capsys, "--session-key", str(key))
    monkeypatch.setenv("INFINISWAP_CLUSTER_SECRET_FILE", str(secret))
    assert made(capsys, "--session-key", str(key)).startswith("0 ")
    assert read_secret(key) == Keys(keys.session)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "two commands" in made(capsys, "--secret", str(secret), "--session-key", str(key))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["etc", "session-key"]


def test_a_secret_can_be_made_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a USB stick (vfat), to carry it to other hosts."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "secret"
    assert main(["init", "--secret", str(path)]) == 0
    assert read_secret(path).operator
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["init", "--secret", str(path)]) == ConflictError.exit_code
    config = tmp_path / "infiniswap.toml"
    assert main(["init", "--config", str(config)]) == 0
    assert stat.S_IMODE(config.stat().st_mode) == 0o644
    assert {each.name for each in tmp_path.iterdir()} == {"secret", "infiniswap.toml"}


@pytest.mark.parametrize("top", [None, Path("/usr/lib/infiniswap")])
def test_what_comes_next_is_no_command_that_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    top: Path | None,
) -> None:
    """In the Debian package, which has brought the units, `service install` is refused."""
    for module in (init, service):
        monkeypatch.setattr(module, "packaged_in", lambda: top)
    assert main(["init", "--config", str(tmp_path / "infiniswap.toml")]) == 0
    said = capsys.readouterr().out
    assert ("infiniswap service install" in said) == (top is None)
    assert ("systemctl enable --now infiniswapd" in said) == (top is not None)
    if top is not None:
        assert main(["service", "install"]) == ConflictError.exit_code
