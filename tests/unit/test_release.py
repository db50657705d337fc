# SPDX-License-Identifier: Apache-2.0
"""tools/release: what stands in the way of a release, its notes, its bill of materials, digests."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from release import __main__ as command
from release import bill, contents
from release.bill import bill_of_materials, check_bill
from release.commit import Commit, look_at
from release.contents import Deb, Inner, Library, PythonPackage, Wheel, deb_contents, wheel_contents
from release.digests import write_sums
from release.notes import release_notes
from support.machine.committed import commit_all
from support.machine.ran import ran

from infiniswap.errors import CheckFailedError, InfiniswapError, UnavailableError, UsageError

PYPROJECT = '[project]\nname = "infiniswap"\nversion = "{}"\n'
CHANGELOG = "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n- New.\n\n## 0.1.0 (2026-11-23)\n\n- Old.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project that can be released."""
    (tmp_path / "infiniswap").mkdir()
    (tmp_path / "infiniswap" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format("0.2.0"))
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("build/\n")
    commit_all(tmp_path)
    return tmp_path


def tag(checkout: Path, name: str) -> None:
    assert ran("git", "-C", checkout, "tag", name).returncode == 0


# ------------------------------------------------------------------------- the commit


def test_a_tagged_commit_without_pending_changes_is_a_release(checkout: Path) -> None:
    assert "has no tag v0.2.0" in look_at(checkout).remark
    tag(checkout, "v0.2.0")
    commit = look_at(checkout)
    assert (commit.version, commit.is_tagged, commit.remark) == ("0.2.0", True, "")
    assert re.fullmatch("[0-9a-f]{40}", commit.name)


def test_a_commit_with_pending_changes_is_built_and_called_no_release(checkout: Path) -> None:
    (checkout / "changes.d").mkdir()
    (checkout / "changes.d" / "+new.added.md").write_text("Something.\n")
    commit_all(checkout)
    tag(checkout, "v0.2.0")
    assert "changes.d/ has 1 entries" in look_at(checkout).remark


@pytest.mark.parametrize("name", ["CHANGELOG.md", "new-file"])
def test_a_work_tree_that_differs_from_its_commit_is_refused(
    checkout: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / name).write_text("changed\n")
    assert command.main(["--checkout", str(checkout), "check"]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert f"the work tree differs from its commit: {name}" in said
    assert "git stash" in said


def test_of_many_changed_files_three_are_named(checkout: Path) -> None:
    for number in range(5):
        (checkout / f"file{number}").touch()
    with pytest.raises(UsageError, match=r"file0, file1, file2 and 2 more"):
        look_at(checkout)


def test_what_git_ignores_is_no_difference(checkout: Path) -> None:
    (checkout / "build").mkdir()
    (checkout / "build" / "x").touch()
    look_at(checkout)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('__version__ = "0.3.0"\n', r"version 0\.2\.0 and infiniswap/__init__\.py 0\.3\.0"),
        ("", r"infiniswap/__init__\.py none"),
    ],
)
def test_two_versions_are_refused(checkout: Path, text: str, words: str) -> None:
    (checkout / "infiniswap" / "__init__.py").write_text(text)
    commit_all(checkout)
    with pytest.raises(UsageError, match=words) as caught:
        look_at(checkout)
    assert "same version into both" in caught.value.mend


def test_a_directory_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkout of git"):
        look_at(tmp_path)


def test_check_says_when_the_commit_was_made(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--checkout", str(checkout), "check"]) == 0
    assert capsys.readouterr().out == f"{look_at(checkout).made_s}\n"


# -------------------------------------------------------------------------- the notes


def test_the_notes_are_the_section_of_the_version(checkout: Path) -> None:
    assert release_notes(look_at(checkout)) == "## 0.2.0 (2026-12-01)\n\n- New.\n"


def test_the_last_section_ends_with_the_file(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text(
        CHANGELOG.replace("0.2.0", "0.9.0").replace("0.1", "0.2")
    )
    commit_all(checkout)
    assert release_notes(look_at(checkout)) == "## 0.2.0 (2026-11-23)\n\n- Old.\n"


def test_a_version_without_a_section_is_refused(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.01 (2026-12-01)\n")
    commit_all(checkout)
    with pytest.raises(UsageError, match=r"no section of version 0\.2\.0"):
        release_notes(look_at(checkout))
    assert command.main(["--checkout", str(checkout), "check"]) == UsageError.exit_code


def test_the_notes_between_releases_are_the_pending_entries(project_root: Path) -> None:
    commit = Commit(project_root, "c" * 40, 1_700_000_000, "0.1.0", False, ("+some.added.md",))
    if not list((project_root / "changes.d").glob("+*.md")):
        pytest.skip("there is no pending change")
    notes = release_notes(commit)
    assert notes.startswith("## 0.1.0+cccccccccccc (2023-11-14)\n\n### ")


# ------------------------------------------------------------------ what packages hold


def fake_wheel(directory: Path, *files: str) -> Path:
    path = directory / "infiniswap-0.2.0-cp311-abi3-manylinux_2_34_x86_64.whl"
    metadata = "Metadata-Version: 2.2\nName: infiniswap\nVersion: 0.2.0\n"
    metadata += 'Requires-Dist: rich<16,>=13\nRequires-Dist: pandas<4,>=2; extra == "demo"\n'
    metadata += 'Requires-Dist: ruff<1,>=0.6; extra == "dev"\n\nText.\n'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("infiniswap-0.2.0.dist-info/METADATA", metadata)
        for name in files:
            archive.writestr(name, b"")
    return path


def fuse_here() -> Path:
    found = sorted(Path("/usr/lib/x86_64-linux-gnu").glob("libfuse3.so.3.*"))
    if not found:
        pytest.skip("needs Debian's libfuse3")
    return found[0]


@pytest.mark.requires_tool("dpkg-query")
def test_a_library_in_the_wheel_is_that_of_a_source_package(tmp_path: Path) -> None:
    """libfuse3 belongs to /lib in Debian 12's package, which auditwheel does not look for."""
    original = fuse_here()
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    copied = f"infiniswap.libs/libfuse3-{digest[:8]}{original.name.removeprefix('libfuse3')}"
    found = wheel_contents(fake_wheel(tmp_path, copied, "infiniswap/x.py"))
    (library,) = found.libraries
    assert (library.file, library.digest) == (original.name, digest)
    assert library.source == "fuse3"
    assert library.package.startswith("libfuse3-")
    form = "--showformat=${source:Version}"
    said = ran("dpkg-query", "--show", form, f"{library.package}:amd64").stdout
    assert library.source_version == said
    assert found.requires[0] == "rich<16,>=13"


def test_a_library_that_this_host_does_not_have_is_an_error(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path, "infiniswap.libs/libfuse3-00000000.so.3.14.0")
    with pytest.raises(UnavailableError, match=r"no libfuse3\.so\.3\.14\.0 whose SHA-256 begins"):
        wheel_contents(wheel)


def test_a_library_of_no_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libown.so.1").write_bytes(b"own")
    digest = hashlib.sha256(b"own").hexdigest()[:8]
    monkeypatch.setattr(contents, "_PLACES", (str(tmp_path),))
    with pytest.raises(UnavailableError, match="no package of Debian has"):
        wheel_contents(fake_wheel(tmp_path, f"infiniswap.libs/libown-{digest}.so.1"))


OPENSSL = Inner("openssl", "4.0.3", "pkg:generic/openssl@4.0.3")
BILL_INSIDE = json.dumps({"components": [{"name": OPENSSL.name, "version": OPENSSL.version,
                                          "purl": OPENSSL.purl}]})  # fmt: skip


def fake_deb(directory: Path, bill_inside: str = BILL_INSIDE) -> Path:
    tree = directory / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: infiniswap\nVersion: 0.2.0~deb12\nArchitecture: amd64\n"
    control += "Maintainer: X <x@example.org>\nDepends: python3.11, kmod\nDescription: x\n"
    (tree / "DEBIAN" / "control").write_text(control)
    (tree / "usr" / "bin").mkdir(parents=True)
    (tree / "usr" / "bin" / "infiniswap").symlink_to("../lib/infiniswap/current/bin/infiniswap")
    packages = tree / "usr/lib/infiniswap/package/lib/python3.11/site-packages"
    for name, version, licence in (
        ("infiniswap", "0.2.0", ""),
        ("rich", "15.0.0", ""),
        ("cryptography", "50.0.2", "License-Expression: Apache-2.0 OR BSD-3-Clause\n"),
    ):
        info = packages / f"{name}-{version}.dist-info"
        (info / "sboms").mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n{licence}\nText\n")
        if name == "cryptography":
            (info / "sboms" / "sbom.json").write_text(bill_inside)
    target = directory / "infiniswap_0.2.0~deb12_amd64.deb"
    done = ran("dpkg-deb", "--root-owner-group", "--build", tree, target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.requires_tool("dpkg-deb")
def test_a_debian_package_tells_the_exact_versions_that_it_carries(tmp_path: Path) -> None:
    deb = deb_contents(fake_deb(tmp_path))
    assert (deb.version, deb.depends) == ("0.2.0~deb12", "python3.11, kmod")
    found = {package.name: package for package in deb.carries}
    assert {name: package.version for name, package in found.items()} == {
        "rich": "15.0.0",
        "cryptography": "50.0.2",
    }
    assert found["cryptography"].license == "Apache-2.0 OR BSD-3-Clause"
    assert (found["cryptography"].carries, found["rich"].carries) == ((OPENSSL,), ())


@pytest.mark.requires_tool("dpkg-deb")
@pytest.mark.parametrize("text", ["{", "[]", '{"components": [{}]}'])
def test_a_bill_inside_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        CheckFailedError, match=r"cryptography-50\.0\.2\.dist-info/sboms/sbom\.json"
    ):
        deb_contents(fake_deb(tmp_path, text))


@pytest.mark.requires_tool("dpkg-deb")
def test_a_damaged_debian_package_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.deb"
    path.write_bytes(b"nothing")
    with pytest.raises(InfiniswapError, match="dpkg-deb cannot read it") as caught:
        deb_contents(path)
    assert str(path) in str(caught.value)


# --------------------------------------------------------------- the bill of materials


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Wheel, Deb]:
    """A source archive, a wheel and a package."""
    source = tmp_path / "infiniswap-0.2.0.tar.gz"
    source.write_bytes(b"sources")
    libraries = (
        Library("libfuse3.so.3.14.0", "a" * 64, "libfuse3-3", "3.14.0-4", "fuse3", "3.14.0-4"),
        Library("liburing.so.2.3", "b" * 64, "liburing2", "2.3-3", "liburing", "2.3-3"),
    )
    wheel = Wheel(
        fake_wheel(tmp_path),
        ("rich<16,>=13", 'pandas<4,>=2; extra == "demo"', "ruff<1,>=0.6; extra == 'dev'"),
        libraries,
    )
    deb = tmp_path / "infiniswap_0.2.0~deb12_amd64.deb"
    deb.write_bytes(b"deb")
    carries = (
        PythonPackage("rich", "15.0.0", "", ()),
        PythonPackage("cryptography", "50.0.2", "Apache-2.0 OR BSD-3-Clause", (OPENSSL,)),
    )
    return source, wheel, Deb(deb, "0.2.0~deb12", "python3.11, kmod", carries)


COMMIT = Commit(Path("/nowhere"), "d" * 40, 1_700_000_000, "0.2.0", True, ())


def components(told: Any) -> dict[str, Any]:
    return {part["bom-ref"]: part for part in told["components"]}


def test_the_bill_names_every_file_and_what_each_carries(parts: tuple[Path, Wheel, Deb]) -> None:
    source, wheel, deb = parts
    text = bill_of_materials(COMMIT, source, wheel, [deb])
    assert text == bill_of_materials(COMMIT, source, wheel, [deb]), "the same files, the same bill"
    told = json.loads(text)
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert told["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert told["metadata"]["component"]["version"] == "0.2.0"
    found = components(told)
    for path in (source, wheel.path, deb.path):
        (digest,) = found[path.name]["hashes"]
        assert digest["content"] == hashlib.sha256(path.read_bytes()).hexdigest()
    carried = {part["name"]: part for part in found[wheel.path.name]["components"]}
    assert carried["fuse3"]["purl"] == "pkg:deb/debian/fuse3@3.14.0-4?arch=source"
    assert set(carried) == {"fuse3", "liburing"}
    packages = {part["name"]: part for part in found[deb.path.name]["components"]}
    assert {name: part["version"] for name, part in packages.items()} == {
        "rich": "15.0.0",
        "cryptography": "50.0.2",
    }
    (openssl,) = packages["cryptography"]["components"]
    assert (openssl["name"], openssl["purl"]) == ("openssl", OPENSSL.purl)


def test_the_bill_has_ranges_for_pip_and_the_hosts_libraries_as_optional(
    parts: tuple[Path, Wheel, Deb],
) -> None:
    source, wheel, deb = parts
    told = json.loads(bill_of_materials(COMMIT, source, wheel, [deb]))
    found = components(told)
    rich, pandas = found["requires:rich"], found["requires:pandas"]
    assert (rich["scope"], pandas["scope"]) == ("required", "optional")
    assert "version" not in rich
    assert {"name": "infiniswap:versions", "value": "<16,>=13"} in rich["properties"]
    assert {"name": "infiniswap:extra", "value": "demo"} in pandas["properties"]
    assert "requires:ruff" not in found, "an extra for work on the project"
    for library in bill.LOADED:
        assert found[f"loaded:{library.file}"]["scope"] == "optional"
    depends = {one["ref"]: one.get("dependsOn", []) for one in told["dependencies"]}
    assert "requires:rich" in depends[wheel.path.name]
    assert wheel.path.name in depends[deb.path.name]


def test_a_bill_that_breaks_the_published_schema_is_refused(
    parts: tuple[Path, Wheel, Deb],
) -> None:
    source, wheel, deb = parts
    text = bill_of_materials(COMMIT, source, wheel, [deb])
    check_bill(text)
    told = json.loads(text)
    told["components"][0]["type"] = "sundries"
    with pytest.raises(CheckFailedError, match="breaks the schema"):
        check_bill(json.dumps(told))


def test_the_libraries_loaded_at_run_time_are_those_of_the_code(project_root: Path) -> None:
    in_code = {
        name
        for path in (project_root / "csrc").rglob("*.c")
        for name in re.findall(r'"(lib[\w.-]+\.so\.\d+)"', path.read_text(encoding="utf-8"))
    }
    assert in_code == {library.file for library in bill.LOADED}


# ---------------------------------------------------------------------------- digests


def test_the_digests_are_what_sha256sum_checks(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    write_sums(tmp_path)  # does not list itself
    done = ran("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=tmp_path)
    assert done.stdout == "a: OK\nb: OK\n"
    (tmp_path / "a").write_text("other")
    assert ran("sha256sum", "--check", "SHA256SUMS", cwd=tmp_path).returncode == 1


def test_gathering_without_a_wheel_is_refused_and_harms_no_earlier_release(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former = checkout / "build" / "release" / "SHA256SUMS"
    former.parent.mkdir(parents=True)
    former.write_text("former\n")
    assert command.main(["--checkout", str(checkout), "gather"]) == UnavailableError.exit_code
    assert "has 0 wheels" in capsys.readouterr().err
    assert former.read_text() == "former\n"
