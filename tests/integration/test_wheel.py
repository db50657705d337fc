# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, what it needs of a host, and what an installation from it has."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from support.machine.ran import ran
from support.machine.wheels import environment, make_wheel

pytestmark = [
    pytest.mark.requires_tool("make", "cmake", "cc"),
    pytest.mark.timeout(900),
]

BUNDLED = {"libfuse3", "liburing", "libIPSec_MB"}


@pytest.fixture(scope="module")
def wheel(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(project_root, tmp_path_factory.mktemp("wheel") / "tree")


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where)
    return where


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, where no program but its own can be found."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    assert ran(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    python = str(venv / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    nowhere = {**os.environ, "PATH": "/nonexistent"}
    done = ran(*pip, "--no-index", "--no-deps", "--only-binary=:all:", wheel, env=nowhere)
    assert done.returncode == 0, done.stderr
    # What it depends on is taken from where the tests have it.
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def elf_files(top: Path) -> list[Path]:
    files = [path for path in top.rglob("*") if path.is_file()]
    return [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]


def patchelf(what: str, path: Path) -> list[str]:
    done = ran("patchelf", f"--print-{what}", path, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_tag_is_one_for_every_python_and_what_auditwheel_finds(wheel: Path) -> None:
    found = re.search(r"-cp311-abi3-(manylinux_2_(\d+)_x86_64)\.whl$", wheel.name)
    assert found, wheel.name
    shown = ran("auditwheel", "show", wheel, env=environment()).stdout
    text = " ".join(shown.split())
    assert f'consistent with the following platform tag: "{found[1]}"' in text
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    assert int(found[2]) <= int(libc.rpartition(".")[2])


@pytest.mark.full
def test_two_builds_in_different_places_are_the_same_file(
    project_root: Path, tmp_path: Path, wheel: Path
) -> None:
    other = make_wheel(project_root, tmp_path / "another-place" / "tree", private=True)
    assert other.name == wheel.name
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, other)}
    assert len(digests) == 1


def test_it_brings_the_libraries_that_it_links_and_leaves_openssl_and_verbs_to_the_host(
    unpacked: Path,
) -> None:
    libraries = {path.name.partition("-")[0]: path for path in unpacked.glob("infiniswap.libs/*")}
    assert set(libraries) == BUNDLED
    extension = unpacked / "infiniswap" / "engine" / "_isw.abi3.so"
    own = {path.name for path in libraries.values()}
    assert set(patchelf("needed", extension)) == own | {"libc.so.6"}
    assert patchelf("rpath", extension) == ["$ORIGIN/../../infiniswap.libs"]
    holder = unpacked / "infiniswap" / "device" / "infiniswap-holder"
    agent = unpacked / "infiniswap" / "device" / "libinfiniswap-far.so"
    assert set(elf_files(unpacked)) == {extension, holder, agent, *libraries.values()}
    for path in (holder, agent, *libraries.values()):
        assert (patchelf("needed", path), patchelf("rpath", path)) == (["libc.so.6"], [])
    (licenses,) = unpacked.glob("*.dist-info/licenses")
    names = {path.name for path in licenses.iterdir()}
    assert names > {"LICENSE", "LGPL-2.1"}
    assert all(
        any(library.lower()[:8] in name for name in names) for library in ("libfuse3", "liburing")
    )


def test_nothing_in_it_names_the_place_where_it_was_built(wheel: Path, unpacked: Path) -> None:
    tree = wheel.parents[2]
    places = [os.fsencode(place) for place in (tree, sys.prefix)]
    for path in unpacked.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(place in content for place in places), path


def test_it_has_all_files_of_the_package_and_the_manual(project_root: Path, unpacked: Path) -> None:
    package = {
        path.relative_to(project_root)
        for path in (project_root / "infiniswap").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert {path for path in package if not (unpacked / path).exists()} == set()
    (share,) = unpacked.glob("*.data/data/share")
    pages = {
        path.relative_to(project_root / "docs") for path in project_root.glob("docs/man/man?/*")
    }
    documents = {
        Path("doc/infiniswap") / path.relative_to(project_root / "docs")
        for path in (project_root / "docs").rglob("*.md")
        if path.relative_to(project_root / "docs").parts[0] not in ("adr", "completion", "man")
    }
    completion = {
        Path("bash-completion/completions/infiniswap"),
        Path("zsh/site-functions/_infiniswap"),
        Path("fish/vendor_completions.d/infiniswap.fish"),
    }
    files = {path.relative_to(share) for path in share.rglob("*") if path.is_file()}
    assert files == pages | documents | completion


FEATURES = """
import importlib.util
from infiniswap.engine.binding import extension_path, library_features
print(extension_path(), *sorted(library_features()))
"""


def test_an_installation_needs_no_compiler_and_lacks_no_part(installed: Path) -> None:
    bare = {"PATH": "/nonexistent"}
    done = ran(installed / "bin" / "python", "-I", "-c", FEATURES, env=bare)
    path, *features = done.stdout.split()
    assert Path(path).is_relative_to(installed), "the test looks at the checkout"
    assert features == ["far", "fuse", "nbd", "nbd-socket", "rdma", "seal", "ublk", "uring"]
    (holder,) = installed.glob("lib/python*/site-packages/infiniswap/device/infiniswap-holder")
    assert os.access(holder, os.X_OK)
    (agent,) = installed.glob("lib/python*/site-packages/infiniswap/device/libinfiniswap-far.so")
    assert agent.stat().st_mode & 0o444 == 0o444
    assert (installed / "share" / "man" / "man1" / "infiniswap.1").exists()
    done = ran(installed / "bin" / "infiniswap", "doctor", "--help", env=bare)
    assert done.returncode == 0, done.stderr


def test_its_services_run_what_is_installed(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "infiniswap"
    done = ran(command, "service", "install", "--root", tmp_path)
    assert done.returncode == 0, done.stderr
    unit = (tmp_path / "etc" / "systemd" / "system" / "infiniswapd.service").read_text()
    assert f"ExecStart={command} daemon" in unit
