# SPDX-License-Identifier: Apache-2.0
"""A host that lends: a memory cgroup with a daemon in it, and a device that wants all it gives."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from infiniswap.errors import SystemCallError, from_oserror
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.files import try_write_text
from infiniswap.units import MIB, PAGE_BYTES, format_size
from isw_bench import cluster
from isw_bench.bench import START_S, Bench
from isw_bench.cluster import Device, device
from isw_bench.scope import PREFIX

HEADROOM_SHARE = 1 / 8
"""The paper's 8 of 64 GiB."""

_PASS_S = 0.3


@contextlib.contextmanager
def host(bench: Bench, name: str) -> Iterator[MemoryCgroup]:
    """A host's memory. It has no swap space."""
    with bench.scope.interrupts.hold():
        made = create_memory_cgroup(f"{PREFIX}{bench.scope.mark}-{name}", bench.settings.host_bytes)
    try:
        file = "memory.swap.max" if made.version == 2 else "memory.swappiness"
        try_write_text(made.path / file, "0")
        yield made
    finally:
        with bench.scope.interrupts.hold():
            made.kill()
            made.remove()


def check_alive(cgroup: MemoryCgroup) -> None:
    """Raises SystemCallError when the host has run out of memory."""
    if cgroup.memory().oom_kills:
        raise SystemCallError("the host ran out of memory, and the kernel killed a process of it")


@dataclass(frozen=True, slots=True)
class Lending:
    """A donor on a host, and a consumer elsewhere.

    Attributes:
        device: the consumer's; as large as the host.
    """

    device: Device

    @property
    def slabs(self) -> int:
        """Slabs that the host lends now."""
        return int(self.device.status()["slabs"].get("mapped", 0))

    @property
    def evictions(self) -> int:
        """Slabs that it has taken back."""
        return int(self.device.status()["evictions"])

    def ask(self, until_s: float, rest_s: float) -> None:
        """Uses every slab again and again, until time.monotonic() is that, or no slab was mapped
        for `rest_s`."""
        seen, changed_s = -1, time.monotonic()
        while time.monotonic() < until_s and time.monotonic() - changed_s < rest_s:
            self._touch()
            time.sleep(_PASS_S)
            slabs = self.slabs
            if slabs != seen:
                seen, changed_s = slabs, time.monotonic()

    def _touch(self) -> None:
        """One page of each slab is enough to want a donor for it."""
        with mmap.mmap(-1, PAGE_BYTES) as page:
            try:
                descriptor = os.open(self.device.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    for offset in range(0, self.device.size_bytes, self.device.slab_bytes):
                        os.pwrite(descriptor, page, offset)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise from_oserror("the consumer's device", error) from error


@contextlib.contextmanager
def lending(bench: Bench, cgroup: MemoryCgroup) -> Iterator[Lending]:
    """A daemon on the host that lends what its headroom leaves, and a device on it."""
    settings = bench.settings
    ready = bench.work / "lender.ready"
    ready.unlink(missing_ok=True)
    headroom_bytes = round(settings.host_bytes * HEADROOM_SHARE) // MIB * MIB
    argv = cluster.daemon_argv(
        ready, settings.slab_bytes, "--memory-cgroup", str(cgroup.path), "--pool",
        format_size(settings.host_bytes), "--headroom", format_size(headroom_bytes),
    )  # fmt: skip
    environment = {
        **cluster.environment(bench), "INFINISWAP_DAEMON_STATE_DIR": str(bench.work / "lender")
    }  # fmt: skip
    with bench.running("lender", argv, changes=environment) as child:
        cgroup.add(child.pid)
        port = bench.until(
            lambda: cluster.control_port(child, ready), "the daemon to serve", START_S
        )
        size_bytes = settings.host_bytes // settings.slab_bytes * settings.slab_bytes
        with device(bench, [f"127.0.0.1:{port}"], size_bytes, settings.slab_bytes) as own:
            yield Lending(own)
