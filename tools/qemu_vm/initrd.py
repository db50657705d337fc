# SPDX-License-Identifier: Apache-2.0
"""The initial RAM disk: a static busybox, the few modules a root over 9p needs, guest/init.

All other modules the guest loads from its /lib/modules, which is the cache's.
"""

from __future__ import annotations

import lzma
import re
import shutil
import tempfile
from pathlib import Path

from infiniswap.errors import NotFoundError, UnavailableError
from qemu_vm import cache, commands
from qemu_vm.kernels import Kernel

_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
_GUEST = Path(__file__).with_name("guest")
_STEP_S = 120.0


def get(kernel: Kernel) -> Path:
    """The RAM disk of a kernel, made where it is not in the cache.

    Raises:
        UnavailableError: busybox is not installed, or not a static one.
        NotFoundError: the kernel lacks a module.
    """
    busybox = Path(commands.find("busybox")).read_bytes()
    if b"/ld-linux" in busybox[:4096]:
        raise UnavailableError(
            "the busybox of this host needs libraries; a RAM disk has none",
            mend="On Debian: apt-get install busybox-static.",
        )
    scripts = [path.read_bytes() for path in sorted(_GUEST.iterdir())]
    digest = cache.key(kernel.release, str(kernel.root), " ".join(_MODULES), busybox, *scripts)
    place = cache.entry(f"initrd-{kernel.name}", digest, lambda inner: _make(kernel, inner))
    return place / "initrd"


def _make(kernel: Kernel, inner: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="infiniswap-vm-") as work:
        root = Path(work)
        for name in ("bin", "modules", "proc", "sys", "dev", "lower", "upper", "newroot"):
            (root / name).mkdir()
        shutil.copy(commands.find("busybox"), root / "bin/busybox")
        for path in _GUEST.iterdir():
            shutil.copy(path, root / path.name)
            (root / path.name).chmod(0o755)
        names = []
        for path in _modules_of(kernel):
            name = f"{path.name.partition('.ko')[0]}.ko"
            (root / "modules" / name).write_bytes(_module(path))
            names.append(name)
        (root / "modules/order").write_text("\n".join(names) + "\n")
        listed = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        argv = ("busybox", "cpio", "-o", "-H", "newc")
        what = "cannot make the RAM disk"
        data = commands.run(*argv, cwd=root, stdin=listed.encode(), bound_s=_STEP_S, what=what)
    (inner / "initrd").write_bytes(data)


def _module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _modules_of(kernel: Kernel) -> list[Path]:
    """In an order in which they can be loaded."""
    found: list[Path] = []
    for name in _MODULES:
        argv = ("modprobe", "-d", str(kernel.root), "-S", kernel.release, "--show-depends", name)
        what = f"kernel {kernel.release} has no module {name}"
        lines = commands.run(*argv, bound_s=_STEP_S, what=what).decode()
        for path in map(Path, re.findall(r"^insmod (\S+)", lines, re.MULTILINE)):
            if not path.is_file():
                raise NotFoundError(f"module {name} is missing", where=str(path))
            if path not in found:
                found.append(path)
    return found
