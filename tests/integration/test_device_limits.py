# SPDX-License-Identifier: Apache-2.0
"""Limits that a device, here no swap space, could not start or live with."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.configs import configured
from support.devices.specs import device_spec

from infiniswap.device.control import launch
from infiniswap.device.spec import rundir
from infiniswap.errors import MemoryLimitError
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.surroundings import leave
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_memcg,
]


@pytest.fixture
def small() -> Iterator[MemoryCgroup]:
    """Too small for an interpreter, and nothing of it may be swapped out."""
    cgroup = create_memory_cgroup(f"isw-test-killed-{os.getpid()}", 12 * MIB)
    file = "memory.swap.max" if cgroup.version == 2 else "memory.swappiness"
    (cgroup.path / file).write_text("0")
    yield cgroup
    cgroup.kill()
    cgroup.remove()


@pytest.mark.parametrize("standby", ["on", "off"])
def test_a_start_that_the_kernel_kills_names_the_limit(
    small: MemoryCgroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standby: str
) -> None:
    """As in a container: the device cannot leave the cgroup."""
    monkeypatch.setattr(leave, "settle", lambda pid, *_, **__: small.add(pid))
    config = configured(
        device__frontend="nbd-socket",
        device__run_dir=str(tmp_path / "run"),
        device__backup_dir=str(tmp_path / "kept"),
        device__slab="1M",
        device__standby=standby,
        cluster__peers="127.0.0.1:1",
    )
    spec = device_spec(config)
    paths = rundir.paths_of(spec.name, tmp_path / "run", tmp_path / "kept")
    with pytest.raises(MemoryLimitError) as failed:
        launch.start(spec, paths)
    assert f"for the memory limit of {small.path} (12" in str(failed.value)


@pytest.mark.parametrize(
    ("more", "limit", "value", "says"),
    [
        ((), resource.RLIMIT_FSIZE, 5 * MIB, "the size of a file here is 5.00 MiB"),
        ((), resource.RLIMIT_CPU, 600, "seconds of processor time here is 600 s"),
        (("--dry-run",), resource.RLIMIT_FSIZE, 5 * MIB, "the size of a file here is 5.00 MiB"),
    ],
)
def test_a_run_under_a_limit_is_refused_before_all_else(
    tmp_path: Path, more: tuple[str, ...], limit: int, value: int, says: str
) -> None:
    """Before a donor is asked: there is none. It is said once."""
    script = (
        "import os, resource, sys\n"
        "limit, value, *command = sys.argv[1:]\n"
        "resource.setrlimit(int(limit), (int(value), int(value)))\n"
        "os.execv(command[0], command)"
    )
    command = [sys.executable, "-I", "-m", "infiniswap", "run", "--local", "32M", "--size", "64M"]
    command += ["--donors", "127.0.0.1:1", *more, "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(limit), str(value), *command],
        env={
            "INFINISWAP_DEVICE_RUN_DIR": str(tmp_path / "run"),
            "INFINISWAP_DEVICE_BACKUP_DIR": str(tmp_path / "kept"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.count(says) == 1, done.stderr
    assert "free space" not in done.stderr
