# SPDX-License-Identifier: Apache-2.0
"""`python -m deb_package build|lock`: what `make deb` and `make deb-lock` run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from deb_package.archive import pack
from deb_package.lock import write_lock
from deb_package.payload import fetch
from deb_package.releases import RELEASES
from deb_package.tree import Package, lay_out
from deb_package.version import package_version
from infiniswap.errors import InfiniswapError

CHECKOUT = Path(__file__).parents[2]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="deb_package")
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="make the packages")
    build.add_argument("--wheel", type=Path, required=True, help="Infiniswap's own")
    build.add_argument("--into", type=Path, required=True, help="directory for the packages")
    build.add_argument("--version", help="of the packages (default: from pyproject.toml and git)")
    build.add_argument(
        "--release",
        action="append",
        choices=[release.number for release in RELEASES],
        help="of Debian (default: every one)",
    )
    actions.add_parser("lock", help="choose the versions of the dependencies")
    args = parser.parse_args()
    os.umask(0o022)
    try:
        if args.action == "lock":
            write_lock(CHECKOUT)
        else:
            _build(args)
    except InfiniswapError as error:
        print(f"deb_package: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _build(args: argparse.Namespace) -> None:
    built_s = int(os.environ.get("SOURCE_DATE_EPOCH", "315532800"))
    version = package_version(CHECKOUT, args.version)
    for release in RELEASES:
        if args.release and release.number not in args.release:
            continue
        with tempfile.TemporaryDirectory(prefix="infiniswap-deb-") as directory:
            work = Path(directory)
            wheels = (args.wheel, *fetch(release, work / "wheels"))
            full = f"{version}~deb{release.number}"
            package = Package(CHECKOUT, wheels, release, full, built_s)
            tree = work / "tree"
            lay_out(package, tree)
            args.into.mkdir(parents=True, exist_ok=True)
            target = args.into / f"infiniswap_{full}_amd64.deb"
            pack(tree, target, built_s)
            print(target)


if __name__ == "__main__":
    sys.exit(main())
