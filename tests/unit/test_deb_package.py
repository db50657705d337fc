# SPDX-License-Identifier: Apache-2.0
"""How the Debian package is made: what it carries, and the same bytes from the same tree."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from deb_package import payload, texts, tree
from deb_package.archive import pack
from deb_package.releases import RELEASES, Release
from deb_package.version import package_version
from packaging.requirements import Requirement
from support.machine.ran import ran

from infiniswap import __version__, config
from infiniswap.cli.service import GROUP, packaged
from infiniswap.code_versions import MARKER
from infiniswap.errors import UsageError
from infiniswap.rights import DONOR_USER, device_capabilities
from infiniswap.system.service_units import PACKAGE_UNIT_DIR, UNITS
from infiniswap.system.swap import SWAP_LABEL_PREFIX

BOOKWORM = RELEASES[0]
WHEN_S = 1_700_000_000
PACKAGES = f"lib/python{BOOKWORM.python}/site-packages"


def make_wheel(path: Path, *, program: str = "a holder") -> Path:
    """One with what the real ones have: a program, files of the system, a license."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, mode, text in (
            ("thing/", 0o40755, ""),
            ("thing/__init__.py", 0o100644, "VALUE = 1\n"),
            ("thing/holder", 0o100755, program),
            ("thing-1.dist-info/licenses/LICENSE", 0o100644, "Apache\nVersion 2.0, January 2004\n"),
            ("thing-1.data/data/share/man/man1/thing.1", 0o100644, "a page"),
            ("thing-1.data/purelib/other.py", 0o100644, ""),
        ):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, text)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "thing-1-py3-none-any.whl")


@pytest.fixture
def laid_out(tmp_path: Path, wheel: Path, project_root: Path) -> Path:
    top = tmp_path / "tree"
    package = tree.Package(project_root, (wheel,), BOOKWORM, "0.1.0~deb12", WHEN_S)
    tree.lay_out(package, top)
    return top


# --------------------------------------------------------------------------- the code


def test_wheels_become_an_environment_of_debians_interpreter(tmp_path: Path, wheel: Path) -> None:
    top = tmp_path / "code"
    payload.unpack([wheel], BOOKWORM, top)
    assert (top / PACKAGES / "thing/holder").stat().st_mode & 0o777 == 0o755
    assert (top / PACKAGES / "thing/__init__.py").stat().st_mode & 0o777 == 0o644
    assert (top / PACKAGES / "other.py").exists()
    assert not list(top.rglob("thing.1")), "the package has pages where Debian has them"
    assert (top / "bin/python3").readlink() == Path("/usr/bin/python3.11")


def test_other_code_has_another_directory(tmp_path: Path, wheel: Path) -> None:
    """Whatever git says of it: the former may be in use."""
    other = make_wheel(tmp_path / "other-1-py3-none-any.whl", program="an holder")
    digests = []
    for name, made_of in (("a", wheel), ("b", wheel), ("c", other)):
        payload.unpack([made_of], BOOKWORM, tmp_path / name)
        digests.append(payload.digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "a" / PACKAGES / "thing/holder").chmod(0o644)
    assert payload.digest(tmp_path / "a") != digests[0]


def test_the_locked_versions_are_those_that_the_package_asks_for(project_root: Path) -> None:
    project = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]
    locked = dict(re.findall(r"^(\S+)==(\S+)", payload.REQUIREMENTS.read_text(), re.MULTILINE))
    for line in project["dependencies"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[wanted.name]), f"{line}: run `make deb-lock`"
    # One digest where a wheel is for every Python, one for each release's otherwise.
    for entry in payload.REQUIREMENTS.read_text().replace("\\\n", "").splitlines():
        if entry[0] != "#":
            assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)) in (1, len(RELEASES))


def test_certificates_need_an_openssl_without_known_faults(project_root: Path) -> None:
    """Wheels of cryptography before 44.0.1 carry one (CVE-2024-12797)."""
    project = tomllib.loads((project_root / "pyproject.toml").read_text())["project"]
    (asked,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "cryptography")
    assert not asked.specifier.contains("44.0.0")
    assert asked.specifier.contains("44.0.1")


# ------------------------------------------------------------------------- the version


def test_the_version_is_the_releases_and_then_grows_with_each_commit(tmp_path: Path) -> None:
    assert package_version(tmp_path) == __version__

    def git(*argv: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        command = ["git", *who, "-C", str(tmp_path), *argv]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=release")
    git("tag", f"v{__version__}")
    assert package_version(tmp_path) == __version__
    found = [f"{__version__}~deb12"]
    for _ in range(10):
        git("commit", "--quiet", "--allow-empty", "--message=next")
        found.append(f"{package_version(tmp_path)}~deb12")
    for before, after in itertools.pairwise(found):
        assert ran("dpkg", "--compare-versions", before, "lt", after).returncode == 0, after


@pytest.mark.parametrize("version", ["v1", "1-2", "1:2", "1/2", "1 2"])
def test_what_is_no_version_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(UsageError, match="cannot be the version of a package"):
        package_version(tmp_path, version)


# ---------------------------------------------------------------------------- the files


def test_every_part_lies_where_debian_looks_for_it(laid_out: Path) -> None:
    for name in (
        "etc/infiniswap/infiniswap.toml",
        "usr/lib/infiniswap/package/bin/infiniswap",
        f"usr/lib/infiniswap/package/{MARKER}",
        "usr/lib/sysusers.d/infiniswap.conf",
        "usr/lib/udev/rules.d/61-infiniswap.rules",
        "usr/share/bash-completion/completions/infiniswap",
        "usr/share/doc/infiniswap/changelog.gz",
        "usr/share/doc/infiniswap/copyright",
        "usr/share/doc/infiniswap/howto/pandas.md",
        "usr/share/doc/infiniswap/when-to-use.md",
        "usr/share/infiniswap/infiniswap-alerts.yml",
        "usr/share/infiniswap/infiniswap-dashboard.json",
        "usr/share/zsh/vendor-completions/_infiniswap",
        *(str(PACKAGE_UNIT_DIR / name) for name in UNITS),
        *(f"{PACKAGE_UNIT_DIR / name}.d/package.conf" for name in UNITS),
    ):
        assert (laid_out / name).is_file(), name
    pages = {path.name for path in laid_out.glob("usr/share/man/man?/*.gz")}
    assert {"infiniswap.1.gz", "infiniswap.toml.5.gz", "infiniswapd.service.8.gz"} <= pages
    page = laid_out / "usr/share/man/man1/infiniswap.1.gz"
    assert b"infiniswap" in gzip.decompress(page.read_bytes())
    command = (laid_out / "usr/lib/infiniswap/package/bin/infiniswap").read_text().splitlines()[0]
    code = re.fullmatch(r"#!(/usr/lib/infiniswap/0\.1\.0-[0-9a-f]{8})/bin/python3 -I", command)
    assert code
    assert f"\ncode=$top/{Path(code[1]).name}\n" in (laid_out / "DEBIAN/postinst").read_text()


def test_its_hint_names_no_command_that_is_refused() -> None:
    hint = texts.script("postinst", BOOKWORM, "0.1.0").partition("next_steps()")[2]
    assert "infiniswap invite --new" in hint
    assert "infiniswap join TOKEN" in hint
    assert "service install" not in hint


def test_its_units_run_the_command_of_the_current_version(laid_out: Path) -> None:
    for name in UNITS:
        text = (laid_out / PACKAGE_UNIT_DIR / name).read_text()
        no_mark = r'\w@[%\w.]|@(NAME|system|mount|setuid|priv|res)|"\$\$@"'  # the last is sh's
        assert "@" not in re.sub(no_mark, "", text)
        assert "ExecStart=/usr/bin/infiniswap " in text
        assert "service install" not in text.splitlines()[0]
        if "@" in name:
            wanted = device_capabilities(cgroup_kill=True, systemd_cgroups=True)
            assert f"CapabilityBoundingSet={' '.join(wanted)}\n" in text
        drop_in = (laid_out / PACKAGE_UNIT_DIR / f"{name}.d/package.conf").read_text()
        assert f"-m {packaged.__name__} sweep" in drop_in
    link = laid_out / "usr/bin/infiniswap"
    assert str(link.readlink()) == "../lib/infiniswap/current/bin/infiniswap"


def test_the_control_data_name_what_is_there(laid_out: Path) -> None:
    control = (laid_out / "DEBIAN/control").read_text()
    assert "Version: 0.1.0~deb12\n" in control
    assert "Depends: python3.11, " in control
    assert (laid_out / "DEBIAN/conffiles").read_text() == "/etc/infiniswap/infiniswap.toml\n"
    done = ran("md5sum", "--check", "--quiet", "DEBIAN/md5sums", cwd=laid_out)
    assert done.returncode == 0, done.stdout
    copyright_text = (laid_out / "usr/share/doc/infiniswap/copyright").read_text()
    assert "thing-1.dist-info/licenses/LICENSE" in copyright_text
    assert "January 2004" not in copyright_text, "Debian has that text already"


@pytest.mark.parametrize("name", texts.SCRIPTS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.codename)
def test_scripts_are_filled_in_and_can_be_read(name: str, release: Release, tmp_path: Path) -> None:
    text = texts.script(name, release, "0.1.0-01234567")
    assert not re.search(r"@[A-Z]+@", text)
    path = tmp_path / name
    path.write_text(text)
    assert ran("sh", "-n", path).returncode == 0


def test_names_are_those_of_the_code(project_root: Path) -> None:
    files = project_root / "tools/deb_package/files"
    users = (files / "sysusers.conf").read_text()
    assert f"\ng {GROUP} - -\n" in users
    assert f"\nu {DONOR_USER} - " in users
    assert f'ENV{{ID_FS_LABEL}}=="{SWAP_LABEL_PREFIX}*"' in (files / "udev.rules").read_text()
    postrm = (project_root / "tools/deb_package/scripts/postrm").read_text()
    assert f"state=/{packaged.PURGE_LIST.parent}\n" in postrm
    assert f"list=$state/{packaged.PURGE_LIST.name}\n" in postrm


def test_the_settings_that_it_brings_change_nothing_and_can_be_put_in_force(
    project_root: Path, tmp_path: Path
) -> None:
    text = (project_root / "tools/deb_package/files/infiniswap.toml").read_text()
    path = tmp_path / "infiniswap.toml"
    path.write_text(text)
    assert config.load(path, environ={}) == config.Config()
    path.write_text(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE))
    found = config.load(path, environ={})
    assert len(found.cluster.peers) == 2
    assert found.cluster.secret_file == Path("/etc/infiniswap/secret")
    assert str(found.daemon.listen) == "10.0.0.1:9400"


# --------------------------------------------------------------------------- the archive


@pytest.mark.requires_tool("dpkg-deb")
def test_a_tree_gives_the_same_bytes_whenever_and_wherever_it_was_made(tmp_path: Path) -> None:
    names = [f"usr/share/doc/thing/{number}" for number in range(20)]
    made: list[bytes] = []
    for place, order, umask in (("a", names, 0o022), ("far/away", names[::-1], 0o077)):
        top = tmp_path / place
        for name in ("DEBIAN/control", *order):
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o777 & ~umask)
            path.write_text(texts.control("1", BOOKWORM, 1) if "control" in name else name)
            path.chmod(0o644)
        os.utime(top / names[0], (len(made), len(made)))
        target = tmp_path / f"{top.name}.deb"
        pack(top, target, WHEN_S)
        made.append(target.read_bytes())
    assert made[0] == made[1]
