# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line. It gets every channel as an open descriptor, so that nothing else can
connect to a machine and nothing is left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qemu_vm.kernels import Kernel
from qemu_vm.plan import Plan

_APPEND = (
    "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr norandmaps no_timer_check "
    "random.trust_cpu=on net.ifnames=0 rdinit=/init cgroup_disable=cpuset"
)
# TCG keeps what it has translated by its address: with norandmaps a program that was run before
# starts in half the time.
# An oops is a failure: what runs on after one proves nothing. `panic=-1` reboots at once, which
# -no-reboot makes the end of QEMU.
# The first cpuset and the end of the last patch a branch in the page allocator of the running
# kernel, for which TCG has processors meet an int3 that is nobody's: an oops, now and then.

_ICOUNT = "shift=2,sleep=on,align=off"
# The clock of an emulated machine counts its instructions, 4 ns each (it executes some hundred
# million a second), so one that gets no processor time does not see its time limits pass. An idle
# one goes by the host's clock (sleep), as what it waits for does. QEMU counts so only where the
# processors of a machine take turns (thread=single).

_ONE_PROCESSOR = frozenset({"6.1"})
# Where processors take turns and the clock counts instructions, these kernels wait for ever for the
# second one to come up.

PROBE_STATUS = 3
"""What the guest writes to the exit device is shifted left, and one is added."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Descriptors that QEMU inherits.

    Attributes:
        console: socket of the kernel's messages.
        out, err: sockets of the command's output; of a terminal, `out` is both ways.
        disk: file of the scratch disk.
        links: streams of the virtual network; the first machine has one to every other one.
    """

    console: int
    out: int
    err: int
    disk: int
    links: Sequence[int] = field(default_factory=tuple)

    @property
    def all(self) -> tuple[int, ...]:
        """All of them."""
        return (self.console, self.out, self.err, self.disk, *self.links)


def _nine(tag: str, path: Path, *, readonly: bool) -> list[str]:
    option = f"local,path={_escaped(str(path))},mount_tag={tag},security_model=none"
    return ["-virtfs", option + ",multidevs=remap" + (",readonly=on" if readonly else "")]


def _escaped(text: str) -> str:
    """A comma separates options; doubled it is one."""
    return text.replace(",", ",,")


def _base(accel: str, kernel: Kernel, initrd: Path, append: str) -> list[str]:
    argv = ["qemu-system-x86_64", "-M", "q35"]
    if accel == "kvm":
        argv += ["-accel", "kvm", "-cpu", "host"]
    else:
        # QEMU 7.2 now and then takes rax for the flags after a cmpxchg16b, which sets the flag of
        # virtual 8086 mode: a double fault in kmem_cache_alloc(). Linux does without it.
        argv += ["-accel", "tcg,thread=single", "-icount", _ICOUNT, "-cpu", "max,cx16=off"]
    argv += ["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-monitor", "none"]
    argv += ["-kernel", str(kernel.image), "-initrd", str(initrd)]
    argv += ["-append", f"{_APPEND} {append}"]
    return [*argv, "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]


def probe_line(accel: str, kernel: Kernel, initrd: Path) -> list[str]:
    """A machine that ends with PROBE_STATUS as soon as its first process runs."""
    return [*_base(accel, kernel, initrd, "vm.probe"), "-m", "256M"]


def command_line(
    plan: Plan, name: str, kernel: Kernel, initrd: Path, host: Path, channels: Channels
) -> list[str]:
    """Program and arguments for one machine.

    Args:
        plan: what is to be.
        name: the machine's.
        kernel, initrd: what it boots.
        host: directory of the host's that guests see as /run/vm/host.
        channels: what QEMU inherits.
    """
    argv = _base(plan.accel, kernel, initrd, f"vm.name={name}")
    cpus = 1 if plan.accel == "tcg" and kernel.name in _ONE_PROCESSOR else plan.cpus
    argv += ["-smp", str(cpus), "-m", f"{plan.memory_bytes >> 20}M"]
    argv += ["-name", f"infiniswap-vm-{name}"]
    argv += ["-chardev", f"socket,id=console,fd={channels.console}", "-serial", "chardev:console"]
    argv += ["-device", "virtio-serial-pci", "-chardev", f"socket,id=out,fd={channels.out}"]
    if plan.terminal:
        argv += ["-device", "virtconsole,chardev=out"]
    else:
        argv += ["-device", "virtserialport,chardev=out,name=out"]
        argv += ["-chardev", f"socket,id=err,fd={channels.err}"]
        argv += ["-device", "virtserialport,chardev=err,name=err"]
    argv += _nine("root", Path("/"), readonly=True) + _nine("host", host, readonly=False)
    argv += _nine("modules", kernel.modules, readonly=True)
    if plan.share:
        argv += _nine("share", plan.share, readonly=False)
    # Nothing on the disk outlives the machine, so nothing need reach the host's.
    disk = f"file=/proc/self/fd/{channels.disk},format=raw,if=virtio,cache=unsafe,discard=unmap"
    return [*argv, "-drive", disk, *_network(plan, name, channels.links)]


def _network(plan: Plan, name: str, links: Sequence[int]) -> list[str]:
    """The machines' network cards are on a hub in the first machine's QEMU."""
    if plan.hosts == 1:
        return []
    number = plan.names.index(name) + 1
    card = f"virtio-net-pci,netdev=card,mac=52:54:00:88:00:{number:02x}"
    if number > 1:
        return ["-netdev", _stream("card", links[0]), "-device", card]
    argv = ["-netdev", "hubport,id=card,hubid=0", "-device", card]
    for place, link in enumerate(links):
        argv += ["-netdev", _stream(f"link{place}", link)]
        argv += ["-netdev", f"hubport,id=port{place},hubid=0,netdev=link{place}"]
    return argv


def _stream(name: str, link: int) -> str:
    return f"stream,id={name},addr.type=fd,addr.str={link}"


def settings(plan: Plan, name: str) -> Mapping[str, str]:
    """What guest/stage2 reads."""
    hosts = [f"{one}={plan.address(one)}" for one in plan.names] if plan.hosts > 1 else []
    return {
        "kernel": plan.kernel,
        "share": "yes" if plan.share else "",
        "terminal": "yes" if plan.terminal else "",
        "hosts": " ".join(hosts),
    }
