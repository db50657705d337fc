# SPDX-License-Identifier: Apache-2.0
"""The wheel in fresh systems without a compiler: they install it and run the demo."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, disk_directory
from support.machine.ran import ran
from support.machine.wheels import make_wheel

from infiniswap.errors import CheckFailedError, NotPermittedError, UnavailableError
from infiniswap.extras import DEMO

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.full,
    pytest.mark.requires_tool("debootstrap", "make", "cmake", "cc", "unshare"),
    pytest.mark.timeout(3600),
]

INSTALLED = "/opt/infiniswap/bin"
_MINUTES_S = 1800.0


@pytest.fixture(scope="module")
def wheel(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(project_root, tmp_path_factory.mktemp("wheel") / "tree")


class FreshSystem:
    """A system in a directory, without a compiler."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)

    def run(self, *argv: str, alone: bool = False) -> subprocess.CompletedProcess[str]:
        """A command in it, as root.

        Args:
            argv: of the command.
            alone: without this host's /dev, /proc and /sys.
        """
        # Mounts in a name space of the command's own end with it. The root is mounted on itself
        # since every path lies on a mounted file system elsewhere, too.
        mounts = "" if alone else 'for d in dev proc sys; do mount --rbind /$d "$0/$d"; done; '
        enter = f'set -e; mount --bind "$0" "$0"; cd "$0"; {mounts}exec chroot "$0" "$@"'
        clean = ("env", "-i", "HOME=/root", f"PATH={INSTALLED}:/usr/sbin:/usr/bin:/sbin:/bin")
        return ran(
            *("unshare", "--mount", "--propagation", "private"),
            *("sh", "-c", enter, str(self.root), *clean, *argv),
            wait_s=_MINUTES_S,
        )

    def install(self, wheel: Path) -> None:
        """What README says, with packages that this host has fetched: the system has no network."""
        version = self.run("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        packages = self.root / "packages"
        fetch = ("download", "--quiet", "--only-binary=:all:", "--dest", packages)
        done = ran(
            *(sys.executable, "-m", "pip", *fetch),
            *("--python-version", version.stdout.strip(), f"{wheel}[demo]"),
            wait_s=_MINUTES_S,
        )
        assert done.returncode == 0, done.stderr
        done = self.run("python3", "-m", "venv", "/opt/infiniswap")
        assert done.returncode == 0, done.stderr
        for what in ((f"/packages/{wheel.name}",), DEMO):
            done = self.run("pip", "install", "--no-index", "--find-links", "/packages", *what)
            assert done.returncode == 0, done.stderr


@pytest.fixture(params=["bookworm", "trixie"])
def fresh(request: pytest.FixtureRequest) -> Iterator[FreshSystem]:
    root = disk_directory()
    try:
        make = ("debootstrap", "--variant=minbase", "--include=python3-venv")
        done = ran(*make, request.param, root, wait_s=_MINUTES_S)
        assert done.returncode == 0, done.stdout[-2000:]
        yield FreshSystem(root)
    finally:
        shutil.rmtree(root)


def test_a_fresh_system_installs_the_wheel_and_runs_the_demo(
    fresh: FreshSystem, wheel: Path
) -> None:
    fresh.install(wheel)
    assert not any(shutil.which(name, path=f"{fresh.root}/usr/bin") for name in ("cc", "gcc"))

    done = fresh.run("infiniswap", "demo", alone=True)
    assert done.returncode == UnavailableError.exit_code, done.stderr
    assert "this host has no /dev/fuse. Load it: modprobe fuse." in done.stderr
    done = fresh.run("setpriv", "--reuid=65534", "--clear-groups", "infiniswap", "demo")
    assert done.returncode == NotPermittedError.exit_code, done.stderr
    assert "sudo infiniswap demo" in done.stderr

    done = fresh.run("infiniswap", "service", "install", "--root", "/")
    assert done.returncode == 0, done.stderr
    unit = (fresh.root / "etc/systemd/system/infiniswapd.service").read_text()
    assert f"ExecStart={INSTALLED}/infiniswap daemon" in unit

    done = fresh.run("infiniswap", "demo", "--json", "/results.json")
    # How much the donors have to serve is for the demo's own test, on a host that is idle.
    assert done.returncode in (0, CheckFailedError.exit_code), done.stdout + done.stderr
    found = json.loads((fresh.root / "results.json").read_text())
    outputs = [leg["output"] for leg in found["legs"]]
    assert len(outputs) == (3 if found["no_far"] else 4)
    assert all(output == outputs[0] for output in outputs)
    assert len(outputs[0]) == 3
    assert all(donor["write_bytes"] > 0 for donor in found["donors"])
    assert sum(donor["read_bytes"] for donor in found["donors"]) > 0
    mounted = Path("/proc/self/mounts").read_text()
    assert str(fresh.root) not in mounted
