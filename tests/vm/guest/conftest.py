# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run in virtual machines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, run, until
from support.jobs.runs import Runner
from support.machine.softroce import soft_roce as soft_roce_device


@pytest.fixture(autouse=True, scope="session")
def vm_kernel(request: pytest.FixtureRequest) -> str:
    """The kernel this runs on, as tools/vm names it; by it the test's id ends in [6.12]."""
    return str(request.param)


@pytest.fixture(scope="session")
def vm_host() -> str:
    """This machine's name: h1, h2, ..."""
    return os.environ["INFINISWAP_VM_HOST"]


@pytest.fixture
def barrier() -> Callable[[str], None]:
    """Waits until every machine of the test has called it with the same word."""

    def wait(word: str, bound_s: int = 600) -> None:
        subprocess.run(["vm-barrier", word, str(bound_s)], check=True, timeout=bound_s + 60)

    return wait


@pytest.fixture(scope="session")
def module_cluster() -> Iterator[Cluster]:
    """One for all modules, and one donor: each process costs many seconds here."""
    own = Cluster()
    try:
        own.donor()
        yield own
    finally:
        own.close()


@pytest.fixture
def runner(module_cluster: Cluster) -> Iterator[Runner]:
    """Runs on that cluster, of which nothing is left."""
    own = Runner(module_cluster)
    try:
        yield own
    finally:
        own.close()


@pytest.fixture(scope="module")
def soft_roce() -> Iterator[str]:
    """An RDMA device's name; its port leads to this machine itself."""
    with soft_roce_device() as device:
        yield device


@pytest.fixture
def modules() -> Callable[..., None]:
    """Loads kernel modules."""

    def load(*names: str) -> None:
        subprocess.run(["modprobe", "-a", *names], check=True, timeout=120)

    return load


@pytest.fixture(scope="session")
def nbd_driver() -> None:
    run("modprobe", "nbd")


@pytest.fixture(scope="session")
def ublk_driver() -> None:
    run("modprobe", "ublk_drv")


@pytest.fixture
def no_ublk_left() -> Iterator[None]:
    """No device, and no word of a bug in the kernel."""
    yield
    until(lambda: not any(Path("/dev").glob("ublk[bc][0-9]*")), "the end of every device")
    wrong = [line for line in run("dmesg").splitlines() if "WARNING" in line or "BUG:" in line]
    assert not wrong, run("dmesg")[-8000:]


@pytest.fixture
def frontend(request: pytest.FixtureRequest, modules: Callable[..., None]) -> str:
    """The front end a test is for (an indirect parameter); its module is loaded."""
    name = str(request.param)
    modules({"nbd": "nbd", "ublk": "ublk_drv"}[name])
    return name
