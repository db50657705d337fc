# SPDX-License-Identifier: Apache-2.0
"""Daemons and devices of another version beside those of this tree, both ways, with real pages over
TCP: what docs/versions.md promises.

The other version is the previous commit and the newest release, or what INFINISWAP_TEST_BEFORE
names: a commit, or a directory with a checkout that is set up.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from isw_bench.before import check_out
from support.devices.cluster import PROGRAM, SLAB, Cluster, Device, Donor, until
from support.devices.copied import Copied
from support.interfaces import Interfaces, interfaces
from support.machine.ran import ran

from infiniswap.errors import DonorRefusedError
from infiniswap.own_code import CODE_OWNER
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [
    pytest.mark.full,
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_tool("git", "make", "cmake", "cc", "nbdcopy"),
    pytest.mark.timeout(3000),
]

BEFORE = "INFINISWAP_TEST_BEFORE"
NEWEST_RELEASE = "the newest release"
SIZE = 32 * MIB
PAGES = SIZE // PAGE_BYTES
DIRECTIONS = [("before", "now"), ("now", "before")]


@dataclass(frozen=True, slots=True)
class Version:
    """A tree with its environment.

    Attributes:
        program: what a command begins with.
        has: the versions of its interfaces.
        knows_owner: its programs know the variable that names the owner of the code.
    """

    program: tuple[str, ...]
    has: Interfaces
    knows_owner: bool

    def use(self, cluster: Cluster) -> None:
        """Commands of the cluster are of this version from now on."""
        cluster.program = self.program
        if self.knows_owner and CODE_OWNER in os.environ:
            cluster.env[CODE_OWNER] = os.environ[CODE_OWNER]
        else:
            cluster.env.pop(CODE_OWNER, None)


def commit_of(root: Path, name: str) -> str:
    """Of a name that git knows; skips where there is none."""
    if name == NEWEST_RELEASE:
        done = ran("git", "-C", root, "describe", "--tags", "--abbrev=0", "--match=v*", "HEAD^")
        if done.returncode != 0:
            pytest.skip("no release has a tag yet")
        return done.stdout.strip()
    if ran("git", "-C", root, "rev-parse", "--verify", "--quiet", name).returncode != 0:
        pytest.skip(f"this checkout knows no commit {name}: its history is not here")
    return name


@pytest.fixture(scope="module", params=[os.environ.get(BEFORE) or "HEAD^", NEWEST_RELEASE])
def versions(request: pytest.FixtureRequest, project_root: Path) -> dict[str, Version]:
    """The other version and this one."""
    if os.environ.get(BEFORE) and request.param == NEWEST_RELEASE:
        pytest.skip(f"{BEFORE} names another one")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MAKE")]:
            patch.delenv(name)  # of the `make` that runs the tests
        tree = Path(request.param)
        if not (tree / "Makefile").exists():
            tree = check_out(commit_of(project_root, request.param), project_root / "build/before")
    python = str(tree.resolve() / ".venv/bin/python")
    place = ran(python, "-I", "-B", "-c", "import infiniswap; print(infiniswap.__file__)").stdout
    assert Path(place).is_relative_to(tree.resolve()), f"the environment of {tree} has {place}"
    program = (python, "-I", "-B", "-m", "infiniswap")
    knows_owner = (tree / "infiniswap" / "own_code.py").exists()
    return {
        "before": Version(program, interfaces(tree), knows_owner),
        "now": Version(PROGRAM, interfaces(project_root), True),
    }


@pytest.fixture(autouse=True)
def cluster_secret(cluster: Cluster, secret_file: Path) -> None:
    """As a cluster of several hosts has it."""
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)


def daemon(cluster: Cluster, version: Version) -> Donor:
    """Started on a port of its own, so that a successor finds what it has lent."""
    version.use(cluster)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
    return cluster.donor(port=port)


def filled(
    cluster: Cluster, version: Version, directory: Path, *options: str
) -> tuple[Device, Copied]:
    """A device with every page on donors."""
    version.use(cluster)
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "60"  # a slow machine restarts slowly
    device = cluster.start("--frontend", "nbd-socket", *options, size=str(SIZE))
    copied = Copied(device, directory)
    copied.fill(SIZE)
    return device, copied


def share(one: frozenset[int], other: frozenset[int]) -> bool:
    return bool(one & other)


@pytest.mark.parametrize(("lends", "pages"), DIRECTIONS)
def test_a_device_pages_to_a_daemon_of_the_other_version_or_is_refused(
    cluster: Cluster, tmp_path: Path, versions: dict[str, Version], lends: str, pages: str
) -> None:
    donor = daemon(cluster, versions[lends])
    if not share(versions[lends].has.control, versions[pages].has.control):
        versions[pages].use(cluster)
        command = ("device", "start", cluster.name(), "--donors", donor.address)
        done = cluster.cli(*command, "--size", str(SIZE), "--frontend", "nbd-socket")
        assert done.returncode == DonorRefusedError.exit_code, done.stderr
        said = done.stderr if pages == "now" else donor.log  # by this version
        assert "protocol" in said
        assert cluster.names() == []
        return
    # Without a backup every page that is read has been with the donor.
    device, copied = filled(cluster, versions[pages], tmp_path, "--backup", "none")
    assert device.status["pages_on_donors"] == PAGES
    assert copied.read_back()["pages_in"] == PAGES
    device.remove()


@pytest.mark.parametrize(("first", "then"), DIRECTIONS)
def test_a_daemon_takes_over_what_one_of_the_other_version_has_lent(
    cluster: Cluster, tmp_path: Path, versions: dict[str, Version], first: str, then: str
) -> None:
    one, other = versions[first].has, versions[then].has
    if not (share(one.donor, other.donor) and share(one.control, other.control)):
        pytest.skip("these versions do not share the format of slabs and records")
    donor = daemon(cluster, versions[first])
    device, copied = filled(cluster, versions[first], tmp_path, "--backup", "none")
    donor.end(signal.SIGTERM)
    versions[then].use(cluster)
    cluster.successor(donor)
    versions[first].use(cluster)
    until(lambda: device.status["slabs"].get("mapped", 0) == SIZE // SLAB, "slabs that are back")
    assert device.status["pages_on_donors"] == PAGES
    assert copied.read_back()["pages_in"] == PAGES
    device.remove()


@pytest.mark.parametrize(("first", "then"), DIRECTIONS)
def test_a_stopped_device_starts_in_the_other_version_or_keeps_its_contents(
    cluster: Cluster, tmp_path: Path, versions: dict[str, Version], first: str, then: str
) -> None:
    donor = daemon(cluster, versions[first])
    device, copied = filled(cluster, versions[first], tmp_path)
    device.stop()
    donor.end(signal.SIGINT)
    donor = daemon(cluster, versions[then])
    if not versions[first].has.tables <= versions[then].has.tables:
        done = cluster.cli("device", "start", device.name, "--donors", donor.address)
        assert done.returncode != 0
        assert "page tables" in done.stderr
        donor.end(signal.SIGINT)
        daemon(cluster, versions[first])  # nothing is lost: it goes on where it came from
    again = cluster.start("--frontend", "nbd-socket", name=device.name, size="")
    assert copied.read_back()["pages_in"] == PAGES
    again.remove()
