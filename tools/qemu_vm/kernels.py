# SPDX-License-Identifier: Apache-2.0
"""Debian's kernels, unpacked into the cache; nothing is installed on this host.

They come from the mirror that this host's apt uses, through a configuration of their own: its
lists, its cache and its record of installed packages are in a temporary directory.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import InfiniswapError, NotFoundError, UnavailableError, UsageError
from qemu_vm import cache, commands

_RECIPE = "2"
"""Raised when what is made of a package changes."""
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_UPDATE_S = 300.0
_DOWNLOAD_S = 900.0
_UNPACK_S = 300.0
_MIRROR = "INFINISWAP_VM_MIRROR"
_MEND = f"Check this host's apt sources and network, or name a Debian mirror with {_MIRROR}."
_SUITES = re.compile(r"(bookworm|trixie|forky|sid|stable|testing|unstable|oldstable)")

SUITES = {"6.12": "bookworm-backports", "6.1": "bookworm"}
"""Where each kernel comes from. The first one is the default."""
DEFAULT = next(iter(SUITES))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in the cache.

    Attributes:
        name: as asked for, "6.12".
        release: as `uname -r` says.
        image: what QEMU boots.
        root: has its modules in lib/modules/RELEASE.
    """

    name: str
    release: str
    image: Path
    root: Path

    @property
    def modules(self) -> Path:
        """What a guest sees as /lib/modules."""
        return self.root / "lib" / "modules"


def get(name: str) -> Kernel:
    """A kernel from the cache; fetched where it is not there.

    Raises:
        UsageError: no such kernel is known here.
        UnavailableError: this host cannot have it: no mirror, another architecture, no apt.
        NotFoundError: the mirror has it no longer.
        SystemCallError, DeadlineError: fetching or unpacking failed.
    """
    if name not in SUITES:
        raise UsageError(f"{name!r} is no kernel known here: {' or '.join(SUITES)}")
    digest = cache.key(_RECIPE, name, SUITES[name])
    place = cache.entry(f"kernel-{name}", digest, lambda inner: _make(name, inner))
    try:
        release = (place / "release").read_text().strip()
        image = place / ("vmlinux" if (place / "vmlinux").exists() else "vmlinuz")
        if not (image.stat().st_size and (place / "lib/modules" / release).is_dir()):
            raise FileNotFoundError(image)
    except OSError as error:
        raise NotFoundError(
            f"the kernel in the cache is damaged ({error})",
            where=str(place),
            mend="Remove that directory, or all of them: tools/vm clean.",
        ) from error
    return Kernel(name, release, image, place)


def _make(name: str, inner: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="infiniswap-vm-") as work:
        package = _fetch(name, Path(work))
        unpacked = Path(work) / "unpacked"
        commands.run(
            "dpkg-deb", "-x", str(package), str(unpacked), bound_s=_UNPACK_S, what="cannot unpack"
        )
        modules = next(
            (p for p in (unpacked / "lib/modules", unpacked / "usr/lib/modules") if p.is_dir()),
            None,
        )
        images = sorted((unpacked / "boot").glob("vmlinuz-*"))
        if modules is None or not images:
            raise NotFoundError(f"no kernel or no modules in it: {package.name}")
        release = images[0].name.removeprefix("vmlinuz-")
        (inner / "lib").mkdir()
        shutil.copytree(modules / release, inner / "lib/modules" / release, symlinks=True)
        shutil.copy(images[0], inner / "vmlinuz")
    commands.run(
        "depmod", "-b", str(inner), release, bound_s=_UNPACK_S, what="cannot list the modules"
    )
    # Decompressing itself takes a kernel seconds where there is no KVM.
    if plain := uncompressed((inner / "vmlinuz").read_bytes()):
        (inner / "vmlinux").write_bytes(plain)
    (inner / "release").write_text(release + "\n")


def uncompressed(image: bytes) -> bytes | None:
    """The ELF image inside a bzImage; None when it is packed in a way not known here.

    Where it lies is in the header that the boot protocol describes
    (https://docs.kernel.org/arch/x86/boot.html): setup_sects, payload_offset, payload_length.
    """
    if image[0x202:0x206] != b"HdrS":
        return None
    setup_bytes = (image[0x1F1] or 4) * 512 + 512
    start = setup_bytes + int.from_bytes(image[0x248:0x24C], "little")
    payload = image[start : start + int.from_bytes(image[0x24C:0x250], "little")]
    try:
        if payload.startswith(b"\xfd7zXZ"):
            plain = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload)
        elif payload.startswith(b"\x28\xb5\x2f\xfd"):
            argv = ("zstd", "-d", "-q", "-c")
            plain = commands.run(*argv, stdin=payload[:-4], bound_s=_UNPACK_S, what="cannot unpack")
        else:
            return None
    except (lzma.LZMAError, InfiniswapError):
        return None
    return plain if plain.startswith(b"\x7fELF") else None


# ---------------------------------------------------------------------------- fetching


def _fetch(name: str, work: Path) -> Path:
    """Downloads the kernel's package into `work`."""
    config = configuration(work, mirror(), SUITES[name])
    env = {"APT_CONFIG": str(config)}
    fail = f"cannot fetch kernel {name}"
    commands.run("apt-get", "update", env=env, bound_s=_UPDATE_S, what=fail, mend=_MEND)
    argv = ("apt-cache", "depends", "linux-image-amd64")
    listed = commands.run(*argv, env=env, bound_s=60.0, what=fail, mend=_MEND).decode()
    package = current(name, listed)
    argv = ("apt-get", "download", package)
    commands.run(*argv, env=env, cwd=work, bound_s=_DOWNLOAD_S, what=fail, mend=_MEND)
    return next(work.glob("linux-image-*.deb"))


def current(name: str, depends: str) -> str:
    """The package that `apt-cache depends linux-image-amd64` leads to.

    Raises:
        NotFoundError: it is of another version.
    """
    for package in re.findall(r"Depends: (linux-image-\S+)", depends):
        if package.startswith(f"linux-image-{name}."):
            return str(package)
    found = re.findall(r"Depends: (linux-image-\S+)", depends)
    raise NotFoundError(
        f"the mirror has no kernel {name} in {SUITES[name]}"
        + (f", but {', '.join(found)}" if found else ""),
        mend=_MEND,
    )


def mirror() -> str:
    """The address of a Debian mirror: INFINISWAP_VM_MIRROR, or the one of this host's apt.

    Raises:
        UnavailableError: none is known.
    """
    if chosen := os.environ.get(_MIRROR):
        return chosen
    argv = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)")
    targets = commands.run(*argv, bound_s=60.0, what="cannot ask apt for its mirror", mend=_MEND)
    for line in targets.decode().splitlines():
        address, suite, component = [*line.split(), "", "", ""][:3]
        if _SUITES.fullmatch(suite) and component == "main":
            return address
    raise UnavailableError("this host's apt knows no Debian mirror", mend=_MEND)


def configuration(work: Path, address: str, suite: str) -> Path:
    """Writes an apt configuration that shares with the host's only how to reach the network."""
    for part in ("lists/partial", "cache/archives/partial", "parts"):
        (work / part).mkdir(parents=True)
    (work / "status").touch()
    signed = f" [arch=amd64 signed-by={_KEYRING}]" if _KEYRING.exists() else " [arch=amd64]"
    (work / "sources.list").write_text(f"deb{signed} {address} {suite} main\n")
    dump = commands.run("apt-config", "dump", bound_s=60.0, what="cannot read apt's configuration")
    kept = [
        line
        for line in dump.decode().splitlines()
        if re.match(r"Acquire::(http|https|ftp|Retries|Check-|AllowInsecure|ForceIPv)", line)
    ]
    config = work / "apt.conf"
    config.write_text(
        "\n".join(
            [
                *kept,
                'APT::Architecture "amd64"; APT::Architectures { "amd64"; };',
                'APT::Sandbox::User "root"; Acquire::Languages "none"; Acquire::Retries "3";',
                f'Dir::Etc::main "/dev/null"; Dir::Etc::parts "{work}/parts";',
                f'Dir::Etc::sourcelist "{work}/sources.list"; Dir::Etc::sourceparts "/dev/null";',
                'Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null";',
                f'Dir::State "{work}"; Dir::State::lists "{work}/lists";',
                f'Dir::State::status "{work}/status"; Dir::Cache "{work}/cache";',
                "",
            ]
        )
    )
    return config
