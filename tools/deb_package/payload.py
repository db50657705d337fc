# SPDX-License-Identifier: Apache-2.0
"""The code of a package: wheels, unpacked into a virtual environment of Debian's interpreter."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from deb_package.releases import Release
from infiniswap.errors import SystemCallError

REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
_PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64"),
)
"""Tags of wheels that run with the glibc of every release."""
_DIGEST_CHARS: Final = 8


def for_python(release: Release) -> list[str]:
    """Options of pip for wheels of a release's interpreter, whatever interpreter runs pip."""
    platforms = [f"--platform={tag}" for tag in _PLATFORMS]
    python = ["--implementation=cp", f"--python-version={release.python}"]
    return ["--only-binary=:all:", *python, *platforms]


def fetch(release: Release, into: Path) -> list[Path]:
    """The dependencies' wheels for a release, each one that requirements.txt names by its hash.

    Raises:
        SystemCallError: pip could not get them.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", *for_python(release)),
            *("--dest", str(into), "--requirement", str(REQUIREMENTS)),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemCallError(
            f"pip cannot get the wheels for Python {release.python}: {done.stderr.strip()}",
            where=str(REQUIREMENTS),
            mend="Check the network; if a version is gone, run `make deb-lock`.",
        )
    return sorted(into.glob("*.whl"))


def unpack(wheels: Iterable[Path], release: Release, into: Path) -> None:
    """Makes the environment, but for the programs in its bin/, which name their place.

    What a wheel has for directories of the system (`*.data/data`) is left out.
    """
    packages = into / "lib" / f"python{release.python}" / "site-packages"
    packages.mkdir(parents=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and (path := _place(entry.filename)) is not None:
                    target = packages / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(entry) as source, target.open("wb") as copy:
                        shutil.copyfileobj(source, copy)
                    target.chmod(0o755 if entry.external_attr >> 16 & 0o100 else 0o644)
    (into / "bin").mkdir()
    (into / "bin" / "python3").symlink_to(f"/usr/bin/python{release.python}")
    (into / "pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = false\n"
        f"version = {release.python}\nexecutable = /usr/bin/python{release.python}\n"
    )


def _place(name: str) -> PurePosixPath | None:
    path = PurePosixPath(name)
    if not path.parts[0].endswith(".data"):
        return path
    if path.parts[1] in ("purelib", "platlib"):
        return PurePosixPath(*path.parts[2:])
    return None


def digest(top: Path) -> str:
    """A few characters that differ where the code differs."""
    total = hashlib.sha256()
    for path in sorted(top.rglob("*")):
        mode = path.lstat().st_mode
        total.update(f"{path.relative_to(top)}\0{mode:o}\0".encode())
        if path.is_symlink():
            total.update(str(path.readlink()).encode())
        elif path.is_file():
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:_DIGEST_CHARS]


def put_programs(top: Path, place: str) -> None:
    """Writes the programs of the environment, for the directory that it is used from."""
    program = top / "bin" / "infiniswap"
    program.write_text(
        f"#!{place}/bin/python3 -I\nimport sys\n\nfrom infiniswap.cli.main import main\n\n"
        "sys.exit(main())\n"
    )
    program.chmod(0o755)
