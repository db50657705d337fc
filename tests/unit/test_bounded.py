# SPDX-License-Identifier: Apache-2.0
"""Rights that a process gives up, and what the programs that it starts have then."""

from __future__ import annotations

import platform
import resource
import sys
import threading
from pathlib import Path

import pytest
from support.machine.ran import ran

from infiniswap import rights
from infiniswap.system import programs, service_units
from infiniswap.system.service_units import DEVICE_UNIT

ROOT = pytest.mark.requires_root


def capabilities(text: str) -> dict[str, int]:
    """By set, and `NoNewPrivs`, of a /proc/PID/status."""
    lines = (line.partition(":\t")[::2] for line in text.splitlines())
    return {key: int(value, 16) for key, value in lines if key[:3] == "Cap" or key == "NoNewPrivs"}


def own() -> dict[str, int]:
    return capabilities(Path("/proc/thread-self/status").read_text())


def started(*argv: str, keep: tuple[str, ...] | None) -> dict[str, int]:
    process = programs.start(argv, stdout=programs.PIPE, keep=keep)
    return capabilities(process.communicate()[0].decode())


@pytest.mark.parametrize("cgroup_kill", [True, False])
@pytest.mark.parametrize("systemd_cgroups", [True, False])
def test_the_unit_and_a_device_started_by_hand_have_one_list(
    cgroup_kill: bool, systemd_cgroups: bool
) -> None:
    names = rights.device_capabilities(cgroup_kill=cgroup_kill, systemd_cgroups=systemd_cgroups)
    text = service_units.render(DEVICE_UNIT, ("/x",), capabilities=names)
    (line,) = [line for line in text.splitlines() if line.startswith("CapabilityBoundingSet=")]
    assert line.partition("=")[2].split() == list(names)
    assert set(names) <= rights.CAPABILITIES.keys()
    assert ("CAP_KILL" in names, "CAP_DAC_OVERRIDE" in names) == (
        not cgroup_kill,
        not systemd_cgroups,
    )
    here = service_units.render(DEVICE_UNIT, ("/x",))
    assert f"\nCapabilityBoundingSet={' '.join(service_units.capabilities_here())}\n" in here


@ROOT
def test_a_program_has_what_it_is_left_and_this_process_keeps_its_own() -> None:
    before, threads = own(), threading.active_count()
    keep = ("CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH")
    wanted = sum(1 << rights.CAPABILITIES[name] for name in keep) & before["CapPrm"]
    seen = started("cat", "/proc/self/status", keep=keep)
    assert seen["NoNewPrivs"] == 1
    assert {seen[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {wanted}
    assert seen["CapInh"] == seen["CapAmb"] == 0
    assert own() == before
    assert started("cat", "/proc/self/status", keep=None) == before
    assert threading.active_count() == threads


@ROOT
@pytest.mark.requires_tool("setpriv")
def test_without_the_right_to_bound_nothing_comes_back_by_a_program() -> None:
    """The bounding set stays; the kernel gives a process without new privileges none of it."""
    code = (
        "from infiniswap.system import bounded, programs; bounded.give_up(('CAP_SYS_ADMIN',));"
        "print(programs.run_command(['cat', '/proc/self/status']))"
    )
    by = ("setpriv", "--bounding-set=-setpcap", "--inh-caps=-setpcap")
    seen = capabilities(ran(*by, sys.executable, "-c", code).stdout)
    admin = (1 << rights.CAPABILITIES["CAP_SYS_ADMIN"]) & own()["CapPrm"]
    assert seen["CapBnd"] & ~admin, "the bounding set could be changed, so this shows nothing"
    assert seen["CapEff"] == seen["CapPrm"] == admin
    assert seen["NoNewPrivs"] == 1


CAPSET = {"x86_64": 126, "aarch64": 91}.get(platform.machine(), -1)
"""Number of the system call."""

WITHOUT_CAPSET = f"""
import ctypes, struct
code = struct.pack("=" + "HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, {CAPSET},
                   6, 0, 0, 0x50001, 6, 0, 0, 0x7FFF0000)
held = ctypes.create_string_buffer(code)
program = struct.pack("@HP", 4, ctypes.addressof(held))
assert ctypes.CDLL(None).prctl(22, 2, program, 0, 0) == 0
from infiniswap.system import bounded
bounded.give_up(("CAP_SYS_ADMIN", "CAP_KILL"))
print(open("/proc/self/status").read())
"""
"""Under a filter that answers capset with EPERM, as that of a device's unit does."""


@ROOT
@pytest.mark.requires_tool("setpriv")
@pytest.mark.skipif(CAPSET < 0, reason="needs the number of capset on this architecture")
@pytest.mark.parametrize("left", ["sys_admin,+setgid", "sys_admin", "sys_admin,+kill"])
def test_under_a_unit_of_another_kernel_it_keeps_what_that_leaves(left: str) -> None:
    """More, less and just as much as this kernel needs."""
    by = ("setpriv", f"--bounding-set=-all,+{left}", "--no-new-privs")
    done = ran(*by, sys.executable, "-c", WITHOUT_CAPSET)
    assert done.returncode == 0, done.stderr
    names = (f"CAP_{name.strip('+').upper()}" for name in left.split(","))
    mask = sum(1 << rights.CAPABILITIES[name] for name in names)
    assert capabilities(done.stdout)["CapPrm"] == mask & own()["CapPrm"]


@ROOT
@pytest.mark.skipif(CAPSET < 0, reason="needs the number of capset on this architecture")
def test_what_nobody_has_bounded_is_not_left_with_all_of_roots_rights() -> None:
    done = ran(sys.executable, "-c", WITHOUT_CAPSET)
    assert "the process cannot give up its rights" in done.stderr
    assert not done.stdout


def limits_after(before: str) -> list[int]:
    """Of real-time priority, and of locked memory."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_RTPRIO, {before});"
        "from infiniswap.system.surroundings.limits import raise_limits; raise_limits();"
        "print(*resource.getrlimit(resource.RLIMIT_RTPRIO),"
        "*resource.getrlimit(resource.RLIMIT_MEMLOCK))"
    )
    return [int(word) for word in ran(sys.executable, "-c", code).stdout.split()]


def test_limits_are_raised_where_they_may_be() -> None:
    if rights.has("CAP_SYS_RESOURCE"):
        assert limits_after("(0, 5)") == [1, 5, resource.RLIM_INFINITY, resource.RLIM_INFINITY]
        assert limits_after("(0, 0)")[:2] == [1, 1]
    else:
        assert limits_after("(0, 0)")[:2] == [0, 0]
