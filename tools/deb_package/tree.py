# SPDX-License-Identifier: Apache-2.0
"""Which file of a package lies where."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deb_package import payload, texts
from deb_package.releases import Release
from infiniswap.code_versions import MARKER
from infiniswap.rights import device_capabilities
from infiniswap.system import service_units

TOP: Final = "usr/lib/infiniswap"
"""Where code lies: dpkg's copy in `package`, and versions of it that postinst makes."""
_FILES: Final = Path(__file__).parent / "files"
_SHARE: Final = "usr/share"
_DOC: Final = f"{_SHARE}/doc/infiniswap"
_UNITS: Final = str(service_units.PACKAGE_UNIT_DIR)


@dataclass(frozen=True, slots=True)
class Package:
    """What a package is made from.

    Attributes:
        checkout: the sources.
        wheels: Infiniswap's own and those of its dependencies.
        release: that it is for.
        version: of the package, the release included.
        built_s: its files' time, seconds since 1970.
    """

    checkout: Path
    wheels: tuple[Path, ...]
    release: Release
    version: str
    built_s: int


def lay_out(package: Package, top: Path) -> None:
    """Writes the package's files, and its control data in DEBIAN/."""
    code = _put_code(package, top / TOP / "package")
    _put_units(top)
    _put_manual(package.checkout, top)
    _put_documents(package, top)
    _copy(_FILES / "infiniswap.toml", top / "etc/infiniswap/infiniswap.toml")
    (top / "etc/infiniswap/devices").mkdir()
    _copy(_FILES / "sysusers.conf", top / "usr/lib/sysusers.d/infiniswap.conf")
    _copy(_FILES / "udev.rules", top / "usr/lib/udev/rules.d/61-infiniswap.rules")
    _copy(_FILES / "lintian-overrides", top / _SHARE / "lintian/overrides/infiniswap")
    (top / "usr/bin").mkdir()
    (top / "usr/bin/infiniswap").symlink_to("../lib/infiniswap/current/bin/infiniswap")
    for name in ("dashboard.json", "alerts.yml"):
        source = package.checkout / "tools/monitoring" / f"infiniswap-{name}"
        _copy(source, top / _SHARE / "infiniswap" / source.name)
    _put_control(package, top, code)


def _put_code(package: Package, where: Path) -> str:
    """Returns the name of the directory that it is used from."""
    payload.unpack(package.wheels, package.release, where)
    (where / MARKER).write_text(f"{package.version}\n")
    upstream = package.version.partition("~deb")[0]
    name = f"{upstream}-{payload.digest(where)}"
    payload.put_programs(where, f"/{TOP}/{name}")
    return name


def _put_units(top: Path) -> None:
    # Of the kernels of these releases, whose init is systemd.
    capabilities = device_capabilities(cgroup_kill=True, systemd_cgroups=True)
    for name in service_units.UNITS:
        text = service_units.render(
            name,
            ("/usr/bin/infiniswap",),
            capabilities=capabilities,
            mark="Of the package infiniswap, whose upgrades replace this file.",
        )
        _write(top / _UNITS / name, text)
        _copy(_FILES / "drop-in.conf", top / _UNITS / f"{name}.d" / "package.conf")


def _put_manual(checkout: Path, top: Path) -> None:
    for page in checkout.glob("docs/man/man?/*"):
        _compress(page.read_bytes(), top / _SHARE / "man" / page.parent.name / f"{page.name}.gz")
    for source, target in (
        ("bash/infiniswap", "bash-completion/completions/infiniswap"),
        ("zsh/_infiniswap", "zsh/vendor-completions/_infiniswap"),
    ):
        _copy(checkout / "docs/completion" / source, top / _SHARE / target)


def _put_documents(package: Package, top: Path) -> None:
    doc = top / _DOC
    changes = texts.changelog(package.version, package.release, package.built_s)
    _compress(changes.encode(), doc / "changelog.gz")
    _compress((package.checkout / "CHANGELOG.md").read_bytes(), doc / "NEWS.gz")
    pages = package.checkout / "docs"
    for path in (*pages.glob("*.md"), *pages.glob("howto/*.md")):  # messages point to them
        _copy(path, doc / path.relative_to(pages))
    packages = next((top / TOP / "package/lib").glob("python*/site-packages"))
    licenses = {
        f"{path.relative_to(packages)}": path
        for path in packages.glob("*.dist-info/**/*")
        if path.is_file() and path.name.lower().startswith(("licen", "copying", "notice", "lib"))
    }
    _write(doc / "copyright", texts.copyright_text(licenses))


def _put_control(package: Package, top: Path, code: str) -> None:
    files = sorted(path for path in top.rglob("*") if path.is_file() and not path.is_symlink())
    kib = sum(-(-path.stat().st_size // 1024) for path in files)
    control = top / "DEBIAN"
    _write(control / "control", texts.control(package.version, package.release, kib))
    _write(control / "md5sums", "".join(_md5(files, top)))
    conffiles = [
        f"/{path.relative_to(top)}\n" for path in files if path.is_relative_to(top / "etc")
    ]
    _write(control / "conffiles", "".join(conffiles))
    for name in texts.SCRIPTS:
        _write(control / name, texts.script(name, package.release, code))
        (control / name).chmod(0o755)


def _md5(files: Iterable[Path], top: Path) -> Iterable[str]:
    from hashlib import md5

    for path in files:
        name = path.relative_to(top)
        if name.parts[0] != "etc":
            # What dpkg compares files with; nothing is kept safe by it.
            yield f"{md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {name}\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _compress(content: bytes, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(content, 9, mtime=0))
    target.chmod(0o644)
