# SPDX-License-Identifier: Apache-2.0
"""`python -m release check|gather`: the two halves of `make release`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from infiniswap.errors import InfiniswapError, UnavailableError
from release.bill import bill_of_materials
from release.commit import Commit, look_at
from release.contents import deb_contents, wheel_contents
from release.digests import write_sums
from release.notes import release_notes
from release.source import make_source

CHECKOUT = Path(__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="release")
    parser.add_argument("--checkout", type=Path, default=CHECKOUT, help="of git (%(default)s)")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check", help="say when the commit was made, if it can be released")
    actions.add_parser("gather", help="put build/dist/ and what belongs to it into build/release/")
    args = parser.parse_args(argv)
    os.umask(0o022)
    try:
        commit = look_at(args.checkout)
        if args.action == "check":
            release_notes(commit)  # before minutes of building, whatever is wrong with them
            print(commit.made_s)
        else:
            gather(commit)
    except InfiniswapError as error:
        print(f"release: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def gather(commit: Commit) -> None:
    """Makes build/release/ whole, or leaves it as it is.

    Raises:
        UnavailableError: no package was built.
    """
    build = commit.checkout / "build"
    work, target = build / "release-work", build / "release"
    shutil.rmtree(work, ignore_errors=True)
    files = work / "release"
    files.mkdir(parents=True)
    for package in sorted((build / "dist").glob("*")):
        if package.suffix in (".whl", ".deb"):
            shutil.copyfile(package, files / package.name)
    wheels = sorted(files.glob("*.whl"))
    if len(wheels) != 1:
        raise UnavailableError(
            f"{build / 'dist'} has {len(wheels)} wheels and a release has one",
            mend="Run `make release`, which builds it.",
        )
    source = make_source(commit, work / "source", files)
    (files / f"infiniswap-{commit.version}-notes.md").write_text(release_notes(commit))
    bill = bill_of_materials(
        commit,
        source,
        wheel_contents(wheels[0]),
        [deb_contents(path) for path in sorted(files.glob("*.deb"))],
    )
    (files / f"infiniswap-{commit.version}.cdx.json").write_text(bill)
    write_sums(files)
    shutil.rmtree(target, ignore_errors=True)
    files.rename(target)
    shutil.rmtree(work)
    for path in sorted(target.iterdir()):
        print(path.relative_to(commit.checkout))
    if commit.remark:
        print(f"release: {commit.remark}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
