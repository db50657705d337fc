# SPDX-License-Identifier: Apache-2.0
"""The Debian package in fresh systems: installed, upgraded while a device runs, purged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deb_package.releases import RELEASES, Release
from support.devices.cluster import NEEDS_SWAP, until
from support.documents import marked
from support.machine.fresh_systems import FreshSystem, fresh_system
from support.machine.wheels import Debs, make_debs

from infiniswap.errors import ConflictError

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.full,
    pytest.mark.requires_tool("debootstrap", "dpkg-deb", "make", "cmake", "cc", "nsenter"),
    pytest.mark.timeout(3600),
]

GUIDE = Path("docs/howto/upgrade.md")
PORT = 9481
SETTINGS = f"""[daemon]
listen = "127.0.0.1:{PORT}"
slab = "8M"
pool = "64M"
headroom = "16M"
[device]
slab = "8M"
"""
# What package management, libc and the tools that add users keep for themselves.
OTHERS = ("var/lib/dpkg", "var/lib/apt", "var/cache", "var/log", "etc/ld.so.cache", "tmp")
OTHERS_ENDS = ("/passwd-", "/group-", "/shadow-", "/gshadow-", "/subuid-", "/subgid-")


@pytest.fixture(scope="module")
def packages(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Debs]:
    return make_debs(project_root, tmp_path_factory.mktemp("debs"))


@pytest.fixture(params=RELEASES, ids=lambda release: release.codename)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


@pytest.fixture
def fresh(release: Release) -> Iterator[FreshSystem]:
    with fresh_system(release.codename) as system:
        yield system


def files(root: Path) -> dict[str, tuple[int, str]]:
    """Mode and contents of every file, without those of others that change."""
    found = {}
    for directory, names, others in os.walk(root):
        for name in (*names, *others):
            path = Path(directory, name)
            relative = str(path.relative_to(root))
            if relative.startswith(OTHERS) or f"/{relative}".endswith(OTHERS_ENDS):
                continue
            if relative.startswith(("dev/", "proc/", "sys/", "run/")):
                continue
            text = ""
            if path.is_symlink():
                text = str(path.readlink())
            elif path.is_file():
                text = f"{path.stat().st_size}"
                if relative.startswith("etc/"):
                    text = path.read_bytes().decode(errors="replace")
            found[relative] = (path.lstat().st_mode, text)
    return found


class Installed:
    """The package in a fresh system."""

    def __init__(self, fresh: FreshSystem, debs: Debs) -> None:
        self.fresh = fresh
        self.names = {}
        for key, path in (("before", debs.before), ("now", debs.now)):
            shutil.copy(path, fresh.root / "tmp" / path.name)
            self.names[key] = f"/tmp/{path.name}"

    def dpkg(self, *argv: str) -> str:
        return self.fresh.ok("dpkg", *argv)

    def refused(self, *argv: str) -> str:
        """A dpkg that must fail; what it says, as one line."""
        done = self.fresh.run("dpkg", *argv)
        assert done.returncode != 0, argv
        return " ".join((done.stdout + done.stderr).split())

    def versions(self) -> list[str]:
        top = self.fresh.root / "usr/lib/infiniswap"
        return sorted(path.name for path in top.iterdir() if path.name[0].isdigit())

    def current(self) -> str:
        return str((self.fresh.root / "usr/lib/infiniswap/current").readlink())

    def device(self, name: str = "one") -> dict[str, Any]:
        text = self.fresh.ok("infiniswap", "device", "show", name, "--json")
        found: dict[str, Any] = json.loads(text)
        return found

    def serve(self, name: str) -> tuple[str, subprocess.Popen[str]]:
        """The former package, with a daemon and a swap device; returns its version."""
        install = ("apt-get", "install", "--yes", "--no-install-recommends")
        self.fresh.ok(*install, self.names["before"])
        (version,) = self.versions()
        (self.fresh.root / "etc/infiniswap/infiniswap.toml").write_text(SETTINGS)
        daemon = self.fresh.start("infiniswap", "daemon")
        until(lambda: self.fresh.run("infiniswap", "status").returncode == 0, "the daemon")
        start = ("infiniswap", "device", "start", name, "--size", "64M", "--frontend", "fuse")
        self.fresh.ok(*start, "--donors", f"127.0.0.1:{PORT}", "--swap")
        until(lambda: self.running() == [version, version], "a standby")
        until(lambda: self.device(name)["succession"]["standby"] == "ready", "its readiness")
        return version, daemon

    def running(self) -> list[str]:
        """The version of each of the device's processes, without the holder."""
        found = []
        for pid in self.fresh.pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "infiniswap.device" in words and "holder" not in words[0]:
                found.append(words[0].split("/")[4])
        return found


def test_it_is_installed_with_all_that_it_needs_and_purged_without_a_trace(
    fresh: FreshSystem, packages: dict[str, Debs], release: Release
) -> None:
    installed = Installed(fresh, packages[release.number])
    for other in RELEASES:
        if other != release:
            path = packages[other.number].now
            shutil.copy(path, fresh.root / "tmp")
            said = installed.refused("-i", f"/tmp/{path.name}")
            assert f"this package is for Debian {other.number}, and this host is Debian" in said
            assert f"ends in ~deb{release.number}" in said
    install = ("apt-get", "install", "--yes", "--no-install-recommends")
    said = fresh.ok(*install, installed.names["now"])
    assert "systemctl enable --now infiniswapd" in said
    assert not any(shutil.which(name, path=f"{fresh.root}/usr/bin") for name in ("cc", "gcc"))
    assert "infiniswap 0." in fresh.ok("infiniswap", "--version")
    assert "library" in fresh.run("infiniswap", "doctor").stdout
    done = fresh.run("infiniswap", "service", "install", "--root", "/")
    assert done.returncode == ConflictError.exit_code
    assert "infiniswap-donor" in fresh.ok("getent", "passwd", "infiniswap-donor")
    # Code that other users can read, and only root can change.
    fresh.ok("setpriv", "--reuid=infiniswap-donor", "--clear-groups", "infiniswap", "--version")
    assert list(fresh.root.glob("usr/lib/infiniswap/current/lib/*/*/infiniswap/__pycache__"))

    # What it needs stays, as apt leaves it.
    installed.dpkg("--purge", "infiniswap")
    without = files(fresh.root)
    installed.dpkg("-i", installed.names["now"])
    fresh.ok("infiniswap", "init", "--secret", "/etc/infiniswap/secret")
    (fresh.root / "etc/infiniswap/devices/one.env").write_text("DEVICE_OPTIONS=--size 1G\n")
    installed.dpkg("--remove", "infiniswap")
    left = set(files(fresh.root)) - set(without)
    assert not any("usr" in name.split("/") for name in left), left
    assert "etc/infiniswap/secret" in left
    said = installed.dpkg("--purge", "infiniswap")
    assert files(fresh.root) == without, said

    fresh.ok(*install, "lintian")
    said = fresh.ok("lintian", "--fail-on", "error", "--allow-root", installed.names["now"])
    assert not [line for line in said.splitlines() if line.startswith(("E:", "W:"))], said


def test_a_device_keeps_its_code_over_an_upgrade_and_the_package_while_it_is_used(
    fresh: FreshSystem, packages: dict[str, Debs], release: Release
) -> None:
    installed = Installed(fresh, packages[release.number])
    old, daemon = installed.serve("one")

    said = installed.dpkg("-i", "--force-confold", installed.names["now"])
    assert "earlier code is kept" in said
    new = installed.current()
    assert installed.versions() == sorted([old, new])
    killed = installed.device()["pid"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in fresh.pids(), "the end of the device's process")
    until(lambda: installed.running() == [old, old], "a standby after the take-over")
    assert installed.device()["succession"]["take_overs"] == 1
    fresh.ok("infiniswap", "device", "restart", "one")
    until(lambda: installed.running() == [new, new], "processes of the new code")

    for action in ("--remove", "--purge"):
        said = installed.refused(action, "infiniswap")
        assert "Infiniswap devices are in use as swap space: one." in said
        assert "infiniswap device stop one" in said
    assert "serving" in fresh.ok("infiniswap", "device", "list")
    fresh.ok("infiniswap", "device", "stop", "one")
    said = installed.refused("--purge", "infiniswap")
    assert "infiniswap daemon" in said
    assert old in installed.versions(), "the daemon runs it"
    daemon.terminate()
    daemon.communicate(timeout=60)
    installed.dpkg("--purge", "infiniswap")
    places = ("etc", "usr/bin", "usr/lib", "usr/share", "usr/share/doc", "var/lib")
    assert [path for place in places for path in (fresh.root / place).glob("*infiniswap*")] == []
    until(lambda: not fresh.pids(), "the end of every process")


def test_the_commands_of_the_guide_upgrade_and_go_back(
    fresh: FreshSystem, packages: dict[str, Debs], release: Release
) -> None:
    installed = Installed(fresh, packages[release.number])
    old, daemon = installed.serve("swap0")
    current = []
    for block in marked(GUIDE, "on", "upgrade"):
        text = block.body.replace("sudo ", "").replace("apt install", "apt-get install --yes")
        # dpkg would ask which of the configuration files is to stay.
        text = text.replace("--yes", "--yes -o Dpkg::Options::=--force-confold")
        for word, name in (("NEW", "now"), ("OLD", "before")):
            text = text.replace(f"./infiniswap_{word}.deb", installed.names[name])
        fresh.ok("sh", "-ec", text)
        current.append(installed.current())
    new = current[1]
    assert current == [old, new, new, old]
    assert new != old
    until(lambda: installed.running() == [old, old], "processes of the former code")
    show = installed.device("swap0")
    assert show["succession"]["take_overs"] == 2
    assert (show["alarms"], show["state"]) == ([], "serving")
    fresh.ok("infiniswap", "device", "remove", "swap0")
    daemon.terminate()
    daemon.communicate(timeout=60)
    installed.dpkg("--purge", "infiniswap")
    until(lambda: not fresh.pids(), "the end of every process")
