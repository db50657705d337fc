# SPDX-License-Identifier: Apache-2.0
"""How to install libraries that only some commands need: the extras of pyproject.toml."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final

from infiniswap.code_versions import packaged_in

DEMO: Final = ("pandas", "pyarrow", "tpchgen-cli")
SIMULATE: Final = ("matplotlib", "numpy", "scipy")


def how_to_install(libraries: Sequence[str], command: str, *, as_root: bool = False) -> str:
    """The remedy where such libraries are not installed.

    They are named one by one, as the name of an extra would make pip look for another project of
    our name in its index.

    Args:
        libraries: all that the command may need.
        command: the one that needs them, as it is typed without sudo.
        as_root: whether it needs root.
    """
    names, sudo = " ".join(libraries), "sudo " if as_root else ""
    if packaged_in() is None:
        sudo = "" if os.access(sys.prefix, os.W_OK) else "sudo "  # to write there
        return f"Install them: {sudo}{shlex.quote(sys.executable)} -m pip install {names}"
    return (
        "The Debian package has none of these libraries. Install the wheel beside it, in the "
        "current directory: python3 -m venv with-libraries; with-libraries/bin/pip install "
        f"infiniswap-*.whl {names}; {sudo}with-libraries/bin/{command}"
    )
