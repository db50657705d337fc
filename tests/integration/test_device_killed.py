# SPDX-License-Identifier: Apache-2.0
"""A device, no swap space, that the kernel kills for a memory limit while it starts."""

from __future__ import annotations

import os
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
