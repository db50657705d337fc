# SPDX-License-Identifier: Apache-2.0
"""`make deb-lock`: which versions of the dependencies a package carries (requirements.txt)."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

from deb_package.payload import REQUIREMENTS, for_python
from deb_package.releases import RELEASES

_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# What the Debian packages carry, with the digests of the wheels for each release's Python.
# Written by `make deb-lock` from pyproject.toml's dependencies.
"""


def write_lock(checkout: Path) -> None:
    """Takes the newest versions that pyproject.toml allows.

    Raises:
        subprocess.CalledProcessError: pip cannot get them.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = defaultdict(set)
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--quiet"),
                    *(*for_python(release), "--dest", directory, *project["dependencies"]),
                ],
                check=True,
            )
            for wheel in Path(directory).glob("*.whl"):
                name, version = wheel.name.split("-")[:2]
                key = f"{re.sub('[_.]+', '-', name).lower()}=={version}"
                found[key].add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    lines = [
        " \\\n    ".join([key, *(f"--hash=sha256:{text}" for text in sorted(found[key]))])
        for key in sorted(found)
    ]
    REQUIREMENTS.write_text(_HEAD + "\n".join(lines) + "\n")
