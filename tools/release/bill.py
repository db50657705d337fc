# SPDX-License-Identifier: Apache-2.0
"""The software bill of materials: CycloneDX 1.6, the same bytes for the same files.

Each file of the release is a component. What a file carries stands inside its component; what it
needs of the host or of PyPI is a component beside it, named in its dependencies. The format has no
place for a range of versions: it stands in the property `infiniswap:versions`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from infiniswap.errors import CheckFailedError
from release.commit import Commit
from release.contents import Deb, Library, PythonPackage, Wheel
from release.digests import sha256

_REQUIREMENT = re.compile(
    r"([A-Za-z0-9._-]+) *(?:\[[^]]*\])? *([^;]*)(?:; *extra *== *['\"](.+)['\"])?"
)
_EXTRAS: Final = frozenset({"", "demo"})
"""The others are for work on the project."""
_NAMESPACE: Final = uuid.UUID("6e0d2c0e-3a5f-5d0b-9d55-0c5f4e0a8b6d")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A library that the C code loads from the host at run time, if the host has it.

    Attributes:
        file: its name.
        why: what is lost without it.
    """

    file: str
    why: str


LOADED: Final = (
    Loaded("libcrypto.so.3", "OpenSSL 3: seals pages where ipsec-mb cannot"),
    Loaded("libibverbs.so.1", "RDMA verbs: without them pages go over TCP"),
)


def bill_of_materials(commit: Commit, source: Path, wheel: Wheel, debs: Sequence[Deb]) -> str:
    """The text of the bill.

    Args:
        commit: that was built.
        source: the source archive.
        wheel, debs: the packages.

    Raises:
        CheckFailedError: the bill breaks the format's schema.
    """
    project = Component(
        name="infiniswap",
        version=commit.version,
        type=ComponentType.APPLICATION,
        bom_ref="infiniswap",
        purl=PackageURL("pypi", None, "infiniswap", commit.version),
        licenses=[LicenseFactory().make_from_string("Apache-2.0")],
        properties=[Property(name="infiniswap:commit", value=commit.name)],
    )
    bom = Bom(
        serial_number=uuid.uuid5(_NAMESPACE, f"{commit.version} {commit.name}"),
        metadata=BomMetaData(
            component=project, timestamp=datetime.fromtimestamp(commit.made_s, UTC)
        ),
    )
    needed = [_requirement(*found) for found in _requirements(wheel.requires)]
    loaded = [_loaded(library) for library in LOADED]
    carried = [_library(library) for library in wheel.libraries]
    of_wheel = _file(wheel.path, "what pip installs", carried)
    archive = _file(source, "the sources, with their tests", [])
    files = [of_wheel, archive]
    bom.register_dependency(of_wheel, [*needed, *loaded, *carried])
    bom.register_dependency(archive, [])
    for deb in debs:
        packages = [_python_package(package, deb) for package in deb.carries]
        about = "the wheel with its dependencies, for a release of Debian"
        component = _file(
            deb.path, about, packages, Property(name="debian:depends", value=deb.depends)
        )
        component.version = deb.version
        bom.register_dependency(component, [of_wheel, *packages])
        files.append(component)
    for part in (*files, *needed, *loaded):
        bom.components.add(part)
    bom.register_dependency(project, files)
    text: str = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    check_bill(text)
    return text


def check_bill(text: str) -> None:
    """Compares a bill with the schema that CycloneDX publishes.

    Raises:
        CheckFailedError: it breaks it.
    """
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error is not None:
        raise CheckFailedError(f"the bill of materials breaks the schema of CycloneDX: {error}")


def _file(path: Path, about: str, carries: Iterable[Component], *properties: Property) -> Component:
    return Component(
        name=path.name,
        type=ComponentType.FILE,
        bom_ref=path.name,
        description=about,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256(path))],
        components=carries,
        properties=properties,
    )


def _requirements(lines: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    """Name, range and extra of what the wheel requires."""
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is None:
            raise CheckFailedError(f"the wheel requires {line!r}, which is not understood")
        name, versions, extra = match[1], match[2].strip(), match[3] or ""
        if extra in _EXTRAS:
            yield name, versions, extra


def _requirement(name: str, versions: str, extra: str) -> Component:
    properties = [Property(name="infiniswap:versions", value=versions)]
    if extra:
        properties.append(Property(name="infiniswap:extra", value=extra))
    return Component(
        name=name,
        type=ComponentType.LIBRARY,
        bom_ref=f"requires:{name}",
        purl=PackageURL("pypi", None, name.lower()),
        scope=ComponentScope.OPTIONAL if extra else ComponentScope.REQUIRED,
        properties=properties,
    )


def _loaded(library: Loaded) -> Component:
    return Component(
        name=library.file,
        type=ComponentType.LIBRARY,
        bom_ref=f"loaded:{library.file}",
        description=f"of the host, loaded at run time. {library.why}",
        scope=ComponentScope.OPTIONAL,
    )


def _library(library: Library) -> Component:
    package = PackageURL(
        "deb", "debian", library.source, library.source_version, {"arch": "source"}
    )
    return Component(
        name=library.source,
        version=library.source_version,
        type=ComponentType.LIBRARY,
        bom_ref=f"carried:{library.file}",
        description=f"{library.file}, built by Debian; auditwheel changed its name and search path",
        scope=ComponentScope.REQUIRED,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=library.digest)],
        purl=package,
        properties=[
            Property(name="debian:package", value=f"{library.package} {library.version}"),
        ],
    )


def _python_package(package: PythonPackage, deb: Deb) -> Component:
    make = LicenseFactory().make_from_string
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{deb.path.name}:{package.name}",
        scope=ComponentScope.REQUIRED,
        licenses=[make(package.license)] if package.license else [],
        purl=PackageURL("pypi", None, package.name.lower(), package.version),
        components=[
            Component(
                name=inner.name,
                version=inner.version or None,
                type=ComponentType.LIBRARY,
                bom_ref=f"{deb.path.name}:{package.name}:{inner.name}@{inner.version}",
                purl=PackageURL.from_string(inner.purl) if inner.purl else None,
            )
            for inner in package.carries
        ],
    )
