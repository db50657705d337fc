# SPDX-License-Identifier: Apache-2.0
"""The texts of a package: control data, changelog, copyright, maintainer scripts."""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from deb_package.releases import Release

MAINTAINER: Final = "Infiniswap maintainers <infiniswap@packages.debian.org>"
SCRIPTS: Final = ("preinst", "postinst", "prerm", "postrm")
_HERE: Final = Path(__file__).parent

_APACHE: Final = "Version 2.0, January 2004"
_DEPENDS: Final = "python{python}, libc6 (>= 2.34), kmod, mount, passwd"
_DESCRIPTION: Final = """\
idle memory of other hosts as swap space
 Infiniswap lends a cluster's idle memory to the hosts that have run out of
 theirs. A host that needs memory gets a swap device whose pages lie in the
 memory of other hosts, over RDMA or TCP, with a copy of every page on the
 local disk. Programs run unmodified.
 .
 This package carries its own Python environment. Devices that run keep the
 code that they were started with over upgrades of the package."""


def control(version: str, release: Release, installed_kib: int) -> str:
    """The control file."""
    fields = {
        "Package": "infiniswap",
        "Version": version,
        "Architecture": "amd64",
        "Maintainer": MAINTAINER,
        "Installed-Size": str(installed_kib),
        "Depends": _DEPENDS.format(python=release.python),
        "Recommends": "systemd, dbus",
        "Suggests": "ibverbs-providers",
        "Section": "admin",
        "Priority": "optional",
        "Description": _DESCRIPTION,
    }
    return "".join(f"{name}: {text}\n" for name, text in fields.items())


def changelog(version: str, release: Release, built_s: int) -> str:
    """The package's changelog; what changed in Infiniswap stands in its own."""
    return (
        f"infiniswap ({version}) {release.codename}; urgency=medium\n\n"
        "  * See NEWS.gz for what changed in Infiniswap.\n\n"
        f" -- {MAINTAINER}  {email.utils.formatdate(built_s)}\n"
    )


def copyright_text(licenses: Mapping[str, Path]) -> str:
    """Whose is what.

    Args:
        licenses: files that came with the wheels, by their names.
    """
    parts = [
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        "Upstream-Name: infiniswap\n\n"
        "Files: *\nCopyright: the authors of Infiniswap\nLicense: Apache-2.0\n"
        " On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n\n"
        "Comment: The Python packages and libraries below /usr/lib/infiniswap/package have\n"
        " licenses of their own. Their texts follow, and lie beside each in *.dist-info.\n"
    ]
    for name, path in sorted(licenses.items()):
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        if _APACHE in text:
            text = "The Apache License 2.0: /usr/share/common-licenses/Apache-2.0."
        parts.append(f"\n{'-' * 70}\n{name}\n{'-' * 70}\n\n{text}\n")
    return "".join(parts)


def script(name: str, release: Release, code: str) -> str:
    """A maintainer script.

    Args:
        name: one of SCRIPTS.
        release: that the package is for.
        code: name of the directory that the code is used from.
    """
    text = (_HERE / "scripts" / name).read_text()
    for word, meant in (
        ("@RELEASE@", release.number),
        ("@PYTHON@", release.python),
        ("@CODE@", code),
    ):
        text = text.replace(word, meant)
    return text
