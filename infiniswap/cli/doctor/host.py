# SPDX-License-Identifier: Apache-2.0
"""Findings about the host itself: rights, kernel, limits, how its processors sleep."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from infiniswap.cli.doctor.finding import Finding, degraded, good, missing
from infiniswap.config import Config
from infiniswap.device.frontends import FRONT_ENDS, Places
from infiniswap.device.frontends.base import Condition, FrontEnd
from infiniswap.donor.memory import MemoryFigures
from infiniswap.donor.pool_limits import headroom_bytes
from infiniswap.engine.seal import SealKeys
from infiniswap.errors import UnavailableError
from infiniswap.rights import has, lacking, way_to
from infiniswap.secret import host_key_path
from infiniswap.system.files import PROC, SYS, read_text, try_read_text
from infiniswap.system.keep_awake import HALTPOLL, CpuLatencyRequest, IdleHost, idle_host
from infiniswap.system.memory import host_memory, machine_memory, memory_hierarchy, parse_meminfo
from infiniswap.system.memory_killers import memory_killers
from infiniswap.system.surroundings.in_force import would_stay
from infiniswap.system.tpm import Tpm
from infiniswap.system.userfault import Obstacle, far_obstacle
from infiniswap.units import MIB, counted, format_size_short

_DEEP_US: Final = 20
"""A sleep that takes longer to end costs a good part of a page-in."""


def number(path: Path) -> int | None:
    """The one number in a file of the kernel; None where there is no such file."""
    text = (try_read_text(path) or "").strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def host(*, proc: Path = PROC) -> Iterator[Finding]:
    """Kernel, processors, memory."""
    memory = host_memory(proc=proc)
    yield good(
        "host",
        f"Linux {platform.release()}, {counted(os.cpu_count() or 1, 'processor')}, "
        f"{format_size_short(memory.available_bytes)} of {format_size_short(memory.total_bytes)} "
        f"available (limited by {memory.limited_by})",
    )


def root(*, proc: Path = PROC) -> Iterator[Finding]:
    """Whether we may do what it takes."""
    what = lacking("CAP_SYS_ADMIN", proc=proc)
    if not what:
        yield good("root", "running as root")
    elif what == "root":
        yield missing(
            "root",
            "not root: devices, swap and memory limits cannot be set up",
            "sudo infiniswap doctor",
        )
    else:
        yield missing(
            "root",
            f"devices, swap and memory limits cannot be set up: that needs {what}",
            way_to(what),
        )


def library() -> Iterator[Finding]:
    """The C library and what it was built with."""
    try:
        from infiniswap.engine.native import library_features
    except ImportError as error:
        yield missing("library", f"the C library is not built ({error})", "make setup")
        return
    built = library_features()
    yield good("library", "the C library is built")
    for name, front_end in FRONT_ENDS.items():
        if name not in built:
            finding = missing if front_end.is_needed else degraded
            yield finding(
                f"build-{name}",
                f"this build has no {name}",
                f"apt install {front_end.packages}; then install Infiniswap again",
            )


def seal(config: Config, keys: SealKeys | None = None) -> Iterator[Finding]:
    """Which library seals pages."""
    try:
        if keys is None:
            from infiniswap.engine.native_seal import NativeSealKeys

            keys = NativeSealKeys()
        library = keys.library()
    except ImportError:
        return  # `library` says so
    except UnavailableError as error:
        if config.device.seal:
            yield missing("seal", error.what, error.mend)
            return
        library = ""
    if config.device.seal:
        yield good("seal", f"devices seal their pages (AES-256-GCM by {library})")
        return
    yield degraded(
        "seal",
        "devices do not seal their pages (device.seal is false): donors, the network and the "
        "backup have them in plain text",
        "seal = true under [device], then stop and start the devices",
    )


def host_key(config: Config, tpm: Tpm | None = None) -> Iterator[Finding]:
    """Where the key is with which this host seals the keys of stopped devices; whether it opens."""
    from infiniswap.device.spec import host_key as keys

    path, tpm = host_key_path(config.device.backup_dir), tpm or Tpm()
    if path.parent.exists() and not os.access(path.parent, os.X_OK):
        return  # `root` says so
    found = keys.place(path)
    if found is None:
        where = "sealed to the TPM of this host" if tpm.is_there() else f"in {path}"
        yield good("host-key", f"none yet; the first device that needs one makes it, {where}")
        return
    with keys.opened(path, tpm, "NAME"):
        pass
    if found != path:
        yield good("host-key", f"{found}: sealed to the TPM of this host")
    elif tpm.is_there():
        yield degraded(
            "host-key",
            f"{path}: in a file, so whoever has the disk can read the contents of stopped devices. "
            "This host has a TPM",
            f"{keys.move_command(path)}. On Debian that needs libtss2-esys-3.0.2-0 and libtss2-rc0",
        )
    else:
        yield good("host-key", f"{path}: in a file, for root alone")


def front_ends(places: Places | None = None) -> Iterator[Finding]:
    """What block devices can be made with. Loads no module: that is for a start."""
    for front_end in FRONT_ENDS.values():
        for found in front_end.examine(places or Places()):
            yield finding_of(front_end, found)


def finding_of(front_end: FrontEnd, found: Condition) -> Finding:
    """What a front end asks of the host, as a finding."""
    if not found.mend:
        return good(found.name, found.what)
    finding = missing if front_end.is_needed else degraded
    return finding(found.name, found.what, found.mend)


def far(obstacle: Callable[[], Obstacle | None] = far_obstacle) -> Iterator[Finding]:
    """Whether this host can do far memory."""
    found = obstacle()
    if found is None:
        yield good("far-memory", f"Linux {platform.release()} can move pages of jobs (UFFDIO_MOVE)")
        return
    yield degraded("far-memory", f"jobs can use swap alone: {found.what}", found.mend)


def memory_cgroup(*, proc: Path = PROC) -> Iterator[Finding]:
    """What limits a job's memory."""
    hierarchy = memory_hierarchy(proc=proc)
    yield good("memory-cgroup", f"version {hierarchy.version} at {hierarchy.mount_point}")
    if hierarchy.version == 1 and not (hierarchy.own / "memory.memsw.usage_in_bytes").exists():
        yield degraded(
            "swap-accounting",
            "the kernel does not account swap to cgroups; peaks are reported without it",
            "boot with swapaccount=1",
        )


def rights(*, proc: Path = PROC) -> Iterator[Finding]:
    """What makes a device process safe to serve swap."""
    if has("CAP_SYS_RESOURCE", proc=proc):
        yield good("cap-sys-resource", "threads can be I/O flushers, oom score can be set")
    else:
        yield degraded(
            "cap-sys-resource",
            "no CAP_SYS_RESOURCE: page-path threads cannot be marked as I/O flushers and the "
            "device process can be killed when memory runs out",
            "run as root outside of restricted containers (docker: --cap-add SYS_RESOURCE)",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or hard == resource.RLIM_INFINITY or hard >= 256 * MIB:
        yield good("memory-lock", "memory can be locked")
    else:
        yield degraded(
            "memory-lock",
            f"at most {format_size_short(hard)} can be locked (now {format_size_short(soft)})",
            "ulimit -Hl unlimited as root (for good: memlock in /etc/security/limits.conf, "
            "LimitMEMLOCK=infinity in a unit)",
        )


def starter(*, proc: Path = PROC) -> Iterator[Finding]:
    """Finds what a daemon or device that is started from this shell would inherit."""
    pid = os.getpid()
    stays = would_stay(pid, leaves=os.geteuid() == 0, proc=proc)
    for found in stays:
        yield degraded(found.name, f"for what is started here: {found.reason}", found.mend)
    if not stays:
        yield good("starter", "nothing limits a daemon or device that is started from this shell")


def open_files(config: Config) -> Iterator[Finding]:
    """Whether a donor's connections would find file descriptors."""
    from infiniswap.control.service import CONNECTIONS_MAX
    from infiniswap.donor.descriptors import wanted_for

    wanted = wanted_for(config.daemon.connections_max + CONNECTIONS_MAX)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        yield good("open-files", f"a donor's connections may open {wanted} files")
        return
    yield degraded(
        "open-files",
        f"only {hard} files may be open, where a donor's connections (daemon.connections_max = "
        f"{config.daemon.connections_max}) may want {wanted}",
        f"ulimit -Hn {wanted} as root, or LimitNOFILE={wanted} in the daemon's unit",
    )


def overcommit(*, proc: Path = PROC) -> Iterator[Finding]:
    """Strict accounting refuses what a job would like to have, swap space or not."""
    if number(proc / "sys/vm/overcommit_memory") != 2:
        yield good("overcommit", "programs may reserve memory freely (vm.overcommit_memory)")
        return
    figures = parse_meminfo(read_text(proc / "meminfo", "cannot read the memory figures"))
    room = max(0, figures.get("CommitLimit", 0) - figures.get("Committed_AS", 0))
    what = (
        f"the kernel accounts strictly (vm.overcommit_memory = 2): {format_size_short(room)} can "
        "still be reserved, plus the size of a swap device"
    )
    if room >= machine_memory(proc=proc).total_bytes // 2:
        yield good("overcommit", what)
    else:
        yield degraded(
            "overcommit",
            f"{what}. Jobs that reserve more fail, even with free memory",
            "sysctl -w vm.overcommit_memory=0",
        )


def killers(config: Config, *, proc: Path = PROC, top: Path = Path("/")) -> Iterator[Finding]:
    """Whether a program that ends others for want of memory acts before a donor does."""
    memory = host_memory(proc=proc)
    headroom = headroom_bytes(config, MemoryFigures(memory.total_bytes, memory.available_bytes))
    total_bytes = parse_meminfo(read_text(proc / "meminfo", "cannot read the memory figures"))
    for killer in memory_killers(total_bytes["MemTotal"], proc=proc, root=top):
        what = (
            f"{killer.name} (process {killer.pid}) ends programs when less than "
            f"{format_size_short(killer.available_bytes)} of memory is available"
        )
        if killer.available_bytes < headroom:
            yield good(
                "memory-killers",
                f"{what}; a donor keeps {format_size_short(headroom)} free (daemon.headroom)",
            )
            continue
        yield degraded(
            "memory-killers",
            f"{what}, which is above the {format_size_short(headroom)} that a donor keeps free "
            "(daemon.headroom): it may end the daemon for the memory that is lent",
            f"a headroom above {format_size_short(killer.available_bytes)} under [daemon], or a "
            f"lower threshold for {killer.name} ({killer.setting})",
        )


# ------------------------------------------------------------------ sleeping processors


def idle(
    config: Config,
    *,
    proc: Path = PROC,
    sys: Path = SYS,
    request: CpuLatencyRequest | None = None,
) -> Iterator[Finding]:
    """How long a processor takes to wake up, and whether the device avoids that."""
    found = idle_host(proc=proc, sys=sys)
    latency_us = found.latency_us
    if latency_us is None:
        if found.is_guest and not found.driver:
            yield degraded(
                "idle",
                "a virtual machine without idle driver: each wake-up of a processor is a trip to "
                "the hypervisor (about 50 µs, four to a page-in), and keep_awake cannot help",
                "modprobe cpuidle_haltpoll force=1",
            )
        else:
            yield good("idle", "processors have no idle states that could be limited")
        return
    how = _how_it_sleeps(found)
    if config.device.keep_awake == "off":
        yield good(
            "idle", f"{how}; device.keep_awake is off, so page-ins wait until a processor wakes up"
        )
    elif problem := (request or CpuLatencyRequest()).check():
        yield degraded("idle", f"{how}; {problem.reason}", problem.mend)
    else:
        yield good("idle", f"{how}; devices limit sleep to {latency_us} µs while pages come in")
    yield from _idle_donor(config, found, sys)


def _how_it_sleeps(found: IdleHost) -> str:
    states = ", ".join(f"{state.name} {state.latency_us} µs" for state in found.states)
    where = "virtual machine, " if found.is_guest else ""
    return f"{where}idle driver {found.driver}, governor {found.governor or 'unknown'} ({states})"


def _idle_donor(config: Config, found: IdleHost, sys: Path) -> Iterator[Finding]:
    """Only where this host's configuration makes it a donor for others."""
    if config.daemon.listen.is_loopback:
        return
    if config.daemon.keep_awake == "auto":
        yield good("idle-donor", "the daemon keeps processors awake while consumers read")
        return
    mend = 'keep_awake = "auto" under [daemon], then restart the daemon'
    if found.driver == HALTPOLL:
        polls_ns = number(sys / "module/haltpoll/parameters/guest_halt_poll_ns")
        if polls_ns:
            yield good("idle-donor", f"processors poll for up to {polls_ns} ns before they halt")
            return
        mend += "; or: echo 200000 > /sys/module/haltpoll/parameters/guest_halt_poll_ns"
    elif max(state.latency_us for state in found.sleeping) < _DEEP_US:
        yield good("idle-donor", "processors wake up quickly")
        return
    yield degraded(
        "idle-donor",
        "consumers of this host's memory wait for its processors to wake up (daemon.keep_awake is "
        "off, as it is this host that would pay)",
        mend,
    )
