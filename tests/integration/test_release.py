# SPDX-License-Identifier: Apache-2.0
"""`make release`: the source archive is one that PyPI takes, and two builds are the same files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from release.commit import look_at
from release.digests import SUMS, sha256
from release.source import make_source
from support.machine.committed import committed_copy, git_environment
from support.machine.ran import ran
from support.machine.runmode import IN_CI
from support.machine.wheels import environment

pytestmark = [pytest.mark.requires_tool("git", "tar"), pytest.mark.timeout(3000)]

_MAKE_S = 1400.0
PLACES = {
    "here": {"LC_ALL": "C", "TZ": "UTC"},
    "another-and-longer-place": {"LC_ALL": "C.UTF-8", "TZ": "Pacific/Auckland"},
}
"""Two that build, with what each has in its environment."""


@pytest.fixture(scope="module")
def committed(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout as one commit."""
    return committed_copy(project_root, tmp_path_factory.mktemp("committed") / "tree")


@pytest.fixture(scope="module")
def source(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("source")
    (where / "made").mkdir()
    return make_source(look_at(committed), where / "work", where / "made")


def test_the_source_archive_is_the_commit_and_its_description(
    committed: Path, source: Path
) -> None:
    listed = ran("git", "-C", committed, "ls-files", env=git_environment()).stdout.splitlines()
    top = source.name.removesuffix(".tar.gz")
    commit = look_at(committed)
    with tarfile.open(source) as archive:
        members = archive.getmembers()
        described = archive.extractfile(f"{top}/PKG-INFO")
        assert described is not None
        headers = HeaderParser().parsestr(described.read().decode())
    assert {member.name for member in members} == {
        f"{top}/{name}" for name in (*listed, "PKG-INFO")
    }
    assert {member.mtime for member in members} == {commit.made_s}
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    modes = {member.name: member.mode for member in members}
    assert set(modes.values()) == {0o644, 0o755}
    assert modes[f"{top}/tools/setup.sh"] == 0o755
    assert (headers["Name"], headers["Version"]) == ("infiniswap", commit.version)
    assert headers["License-Expression"] == "Apache-2.0"


def test_the_source_archive_does_not_depend_on_who_makes_it(
    committed: Path, source: Path, tmp_path: Path
) -> None:
    """In another place, by somebody whose files nobody else may read."""
    other = tmp_path / "another-place"
    done = ran("git", "clone", "--quiet", committed, other, env=git_environment())
    assert done.returncode == 0, done.stderr
    program = (
        "import os, sys; from pathlib import Path; os.umask(0o077); "
        "from release.commit import look_at; from release.source import make_source; "
        "Path('made').mkdir(); "
        "make_source(look_at(Path(sys.argv[1])), Path('work'), Path('made'))"
    )
    tools = Path(__file__).resolve().parents[2] / "tools"
    paths = f"{tools}{os.pathsep}{tools.parent}"
    env = {**os.environ, "LC_ALL": "C", "TZ": "Pacific/Auckland", "PYTHONPATH": paths}
    done = ran("sh", "-c", 'umask 077; exec "$0" "$@"', sys.executable, "-c", program, other,
               cwd=tmp_path, env=env)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sha256(tmp_path / "made" / source.name) == sha256(source)


def make_release(tree: Path, umask: str, changes: dict[str, str]) -> Path:
    """`make release` in a tree; returns its directory."""
    env = {**environment(), **git_environment(), **changes}
    env["PATH"] = environment()["PATH"]
    make = ("make", "--silent", f"VENV={sys.prefix}", "release")
    done = ran("sh", "-c", f'umask {umask}; exec "$@"', "sh", *make,
               cwd=tree, env=env, wait_s=_MAKE_S)  # fmt: skip
    lacking = [line for line in done.stderr.splitlines() if "asked for and not found" in line]
    if lacking and not IN_CI:
        pytest.skip(lacking[0].strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "build" / "release"


@pytest.mark.full
@pytest.mark.requires_tool("make", "cmake", "cc", "dpkg-deb", "dpkg-query")
def test_two_releases_of_a_commit_are_the_same_files(project_root: Path, tmp_path: Path) -> None:
    commit = committed_copy(project_root, tmp_path / "commit")
    releases = []
    for (name, changes), umask in zip(PLACES.items(), ("022", "077"), strict=True):
        tree = shutil.copytree(commit, tmp_path / name)
        releases.append(make_release(tree, umask, changes))
    first, second = ({path.name: sha256(path) for path in at.iterdir()} for at in releases)
    assert first == second
    done = ran("sha256sum", "--check", "--strict", SUMS, cwd=releases[0])
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == len(first) - 1
    assert {name.rpartition(".")[2] for name in first} >= {"gz", "whl", "md", "json", SUMS}

    (bill,) = releases[0].glob("*.cdx.json")
    told = {part["name"]: part for part in json.loads(bill.read_text())["components"]}
    assert set(first) - {SUMS, bill.name} <= {*told, *(path for path in first if ".md" in path)}
    (wheel,) = releases[0].glob("*.whl")
    assert {part["name"] for part in told[wheel.name]["components"]} == {
        "fuse3",
        "intel-ipsec-mb",
        "liburing",
    }

    # Whoever has the source archive alone gets the same wheel.
    (source,) = releases[0].glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    time = str(look_at(commit).made_s)
    # Our virtual environment is set up.
    for name in ("pyproject.toml", "tools/setup.sh", "tools/setup_venv.sh"):
        os.utime(unpacked / name, (0, 0))
    make = ("make", "--silent", f"VENV={sys.prefix}", "wheel")
    done = ran(*make, cwd=unpacked, wait_s=_MAKE_S,
               env={**environment(), "SOURCE_DATE_EPOCH": time})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sha256(unpacked / "build" / "dist" / wheel.name) == first[wheel.name]
