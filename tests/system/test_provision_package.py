# SPDX-License-Identifier: Apache-2.0
"""vagrant/provision with the Debian package, in a fresh Debian 12 without systemd.

rxe.sh needs a kernel with rdma_rxe, so pages go over TCP: tests/vm/guest/test_soft_roce.py and
test_provision.py run that script.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, until
from support.machine.fresh_systems import FreshSystem, fresh_system
from support.machine.ran import ran
from support.machine.wheels import copy_checkout, environment, make_in

SETTINGS = "SLAB=8M POOL=96M HEADROOM=16M SIZE=96M FRONTEND=fuse BACKUP_DIR=/var/lib/infiniswap"
ADDRESS = "127.0.0.1"
JOB = 'data = bytearray(b"x") * (48 << 20); print(data.count(b"x"))'

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.full,
    pytest.mark.requires_tool("debootstrap", "dpkg-deb", "make", "cmake", "cc", "nsenter"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def packages(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For Debian 12 and 13, and another version for Debian 12, by version and release."""
    tree = copy_checkout(project_root, tmp_path_factory.mktemp("provision") / "tree")
    made = make_in(tree, "deb", "DEB_ARGS=--version 0.0.1")
    (wheel,) = made.glob("*.whl")
    again = ("--wheel", str(wheel), "--into", str(made), "--release", "12", "--version", "0.0.2")
    env = {**environment(), "PYTHONPATH": "tools:."}
    done = ran(sys.executable, "-m", "deb_package", "build", *again, cwd=tree, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.partition("_")[2].partition("_")[0]: path for path in made.glob("*.deb")}
    assert sorted(found) == ["0.0.1~deb12", "0.0.1~deb13", "0.0.2~deb12"]
    return found


@pytest.fixture
def fresh(project_root: Path) -> Iterator[FreshSystem]:
    with fresh_system("bookworm") as system:
        shutil.copytree(project_root / "vagrant" / "provision", system.root / "provision")
        (system.root / "packages").mkdir()
        yield system


def offer(fresh: FreshSystem, *packages: Path) -> None:
    """Leaves these, and no others, where install.sh looks."""
    for path in (fresh.root / "packages").iterdir():
        path.unlink()
    for path in packages:
        shutil.copy(path, fresh.root / "packages")


def test_machines_are_made_of_the_package_and_page(
    fresh: FreshSystem, packages: dict[str, Path]
) -> None:
    install = ("sh", "/provision/install.sh", "/packages")
    offer(fresh, packages["0.0.1~deb13"])
    refused = fresh.run(*install)
    assert refused.returncode == 1
    assert "no package for Debian 12 and amd64 in /packages: infiniswap_0.0.1" in refused.stderr

    offer(fresh, packages["0.0.1~deb12"], packages["0.0.1~deb13"])
    assert "install: the package infiniswap_0.0.1~deb12" in fresh.ok(*install)
    assert "infiniswap 0.0.1~deb12 is there already" in fresh.ok(*install)

    (fresh.root / "tmp/secret").write_text(secrets.token_hex(32))
    env = ("env", *SETTINGS.split())
    said = fresh.ok(*env, "sh", "/provision/donor.sh", ADDRESS, "/tmp/secret")
    assert f"lends up to 96M at {ADDRESS}:9400" in said
    # One host: the consumer's configuration takes the place of the donor's, which goes on.
    said = fresh.ok(*env, "sh", "/provision/consumer.sh", "/tmp/secret", ADDRESS)
    assert "ready, for example: infiniswap run" in said
    try:
        job = ("infiniswap", "run", "--local", "20M", "--device", "swap0", "--", "python3", "-c")
        assert f"{48 << 20}\n" in fresh.ok(*job, JOB)
        show = json.loads(fresh.ok("infiniswap", "device", "show", "swap0", "--json"))
        assert show["stats"]["pages_in_remote"] > 0

        # As `vagrant provision` does after `make deb` of another commit.
        offer(fresh, packages["0.0.2~deb12"])
        assert "install: the package infiniswap_0.0.2~deb12" in fresh.ok(*install)
        assert show["pid"] in fresh.pids()
        fresh.ok("infiniswap", "device", "restart", "swap0")
    finally:
        fresh.run("infiniswap", "device", "remove", "swap0")
        fresh.run("sh", "-c", "kill $(cat /run/infiniswapd.pid)")
    until(lambda: not fresh.pids(), "the end of every process")
