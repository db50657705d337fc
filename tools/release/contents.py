# SPDX-License-Identifier: Apache-2.0
"""What is inside the packages: other people's libraries and Python packages, with versions."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from infiniswap.errors import CheckFailedError, SystemCallError, UnavailableError
from release.digests import sha256

_LIBRARY = re.compile(r"infiniswap\.libs/(?P<stem>.+)-(?P<digest>[0-9a-f]{8})(?P<end>\.so.*)")
"""The name that auditwheel gives to a copy, with the beginning of the original's SHA-256."""
_PLACES = ("/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library that the wheel carries.

    Attributes:
        file: its name on the host that the wheel was built on.
        digest: SHA-256 of the file there. auditwheel has changed the copy's name and search path.
        package, version: the binary package that it is from.
        source, source_version: the source package, which has the licence and the sources.
    """

    file: str
    digest: str
    package: str
    version: str
    source: str
    source_version: str


@dataclass(frozen=True, slots=True, order=True)
class Inner:
    """What a wheel of PyPI has compiled in, by the bill of materials that it brings (PEP 770).

    Attributes:
        name, version: as the bill has them.
        purl: its package URL; empty where the bill has none.
    """

    name: str
    version: str
    purl: str


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """One of PyPI.

    Attributes:
        name, version: as in its metadata.
        license: SPDX expression; empty where its metadata have none.
        carries: what its wheel says of its own contents, such as OpenSSL in cryptography.
    """

    name: str
    version: str
    license: str
    carries: tuple[Inner, ...]


@dataclass(frozen=True, slots=True)
class Wheel:
    """Attributes:
    path: of the file.
    requires: what its metadata require, such as "aiohttp<4,>=3.14" or "pandas>=2; extra == 'demo'".
    libraries: that it carries.
    """

    path: Path
    requires: tuple[str, ...]
    libraries: tuple[Library, ...]


@dataclass(frozen=True, slots=True)
class Deb:
    """Attributes:
    path: of the file.
    version: of the package.
    depends: packages of Debian, in the words of its `Depends`.
    carries: Python packages, without Infiniswap itself.
    """

    path: Path
    version: str
    depends: str
    carries: tuple[PythonPackage, ...]


def wheel_contents(path: Path) -> Wheel:
    """Of the wheel, which was built on this host.

    Raises:
        UnavailableError: it is not known where a library in it is from.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    found = [match for name in sorted(names) if (match := _LIBRARY.fullmatch(name))]
    libraries = [_library(match["stem"] + match["end"], match["digest"]) for match in found]
    return Wheel(path, tuple(headers.get_all("Requires-Dist", [])), tuple(libraries))


def _library(file: str, digest: str) -> Library:
    for place in _PLACES:
        original = Path(place, file)
        if original.is_file() and (whole := sha256(original)).startswith(digest):
            return Library(file, whole, *_package_of(original))
    raise UnavailableError(
        f"this host has no {file} whose SHA-256 begins with {digest}, which the wheel carries",
        where=", ".join(_PLACES),
        mend="Run `make release` on the host that builds the wheel, and upgrade no packages "
        "meanwhile.",
    )


def _package_of(file: Path) -> tuple[str, str, str, str]:
    """Binary package and version, source package and version."""
    # Debian 12 has merged /lib into /usr/lib, and dpkg knows a file by the name in its package. (It
    # is why auditwheel's own bill of materials lacks libfuse3: it asks for the merged name alone.)
    names = (str(file), str(file).removeprefix("/usr"))
    for name in names:
        owner = _dpkg("--search", name).partition(": ")[0].strip()
        if owner:
            form = "${binary:Package}\t${Version}\t${source:Package}\t${source:Version}"
            package, *others = _dpkg("--show", f"--showformat={form}", owner).split("\t")
            if len(others) == 3:
                return package.partition(":")[0], others[0], others[1], others[2]
    raise UnavailableError(
        f"no package of Debian has {' or '.join(names)}, so that nobody can tell its version",
        mend="Build the release on Debian, with its own libraries.",
    )


def _dpkg(*argv: str) -> str:
    """What dpkg-query says; nothing where it knows nothing."""
    try:
        done = subprocess.run(["dpkg-query", *argv], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def deb_contents(path: Path) -> Deb:
    """Of a package for Debian.

    Raises:
        SystemCallError: dpkg-deb cannot read it.
        CheckFailedError: a bill of materials in it is no JSON.
    """
    version, depends = (
        _dpkg_deb("--field", path, name).decode() for name in ("Version", "Depends")
    )
    with tarfile.open(fileobj=io.BytesIO(_dpkg_deb("--fsys-tarfile", path))) as archive:
        texts: dict[str, str] = {}
        inner: dict[str, set[Inner]] = {}
        for member in archive:
            name = PurePosixPath(member.name)
            file = archive.extractfile(member) if member.isfile() else None  # links lead elsewhere
            if file is not None and name.match("*.dist-info/METADATA"):
                texts[name.parent.name] = file.read().decode()
            elif file is not None and name.match("*.dist-info/sboms/*.json"):
                inner.setdefault(name.parts[-3], set()).update(_inner(file.read(), member.name))
    carried = _python_packages(texts, inner)
    own = [package for package in carried if package.name != "infiniswap"]
    return Deb(path, version.strip(), depends.strip(), tuple(own))


def _inner(bill: bytes, name: str) -> Iterable[Inner]:
    """Of a bill in CycloneDX's JSON."""
    try:
        parts = json.loads(bill).get("components", [])
        return [
            Inner(str(part["name"]), str(part.get("version", "")), str(part.get("purl", "")))
            for part in parts
        ]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckFailedError(
            f"{name} is no bill of materials in CycloneDX's JSON: {error!r}",
            mend="Look at the package that brings it; another version may do better.",
        ) from error


def _python_packages(
    texts: dict[str, str], inner: dict[str, set[Inner]]
) -> Iterable[PythonPackage]:
    for directory, text in sorted(texts.items()):
        headers = HeaderParser().parsestr(text)
        yield PythonPackage(
            headers["Name"],
            headers["Version"],
            headers.get("License-Expression", ""),
            tuple(sorted(inner.get(directory, ()))),
        )


def _dpkg_deb(action: str, path: Path, *argv: str) -> bytes:
    try:
        done = subprocess.run(
            ["dpkg-deb", action, str(path), *argv], check=True, capture_output=True
        )
    except FileNotFoundError as error:
        raise SystemCallError("dpkg-deb is not installed", mend="Use Debian.") from error
    except subprocess.CalledProcessError as error:
        raise SystemCallError(
            f"dpkg-deb cannot read it: {error.stderr.decode().strip()}", where=str(path)
        ) from error
    return done.stdout
