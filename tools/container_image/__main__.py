# SPDX-License-Identifier: Apache-2.0
"""`python -m container_image --deb FILE --into DIRECTORY`: what `make image` runs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infiniswap.errors import InfiniswapError, NotPermittedError, UnavailableError, UsageError
from infiniswap.system.programs import run_command

NAME = "infiniswap"
USER_ID = 9400
_USER = "infiniswap-donor"
_SUITE = "bookworm"
_MADE_FOR = "~deb12_"
_BUILD_S = 1800.0
_TOOLS = {"debootstrap": "debootstrap", "buildah": "buildah", "dpkg-deb": "dpkg"}
"""Program, and the package of Debian that has it."""
_NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/locale")
_LABELS = {
    "org.opencontainers.image.title": "Infiniswap donor",
    "org.opencontainers.image.description": "Lends this host's idle memory to other hosts",
    "org.opencontainers.image.licenses": "Apache-2.0",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="container_image")
    parser.add_argument("--deb", type=Path, nargs="+", required=True, help="one of Debian 12")
    parser.add_argument("--into", type=Path, required=True, help="directory for the archive")
    args = parser.parse_args(argv)
    try:
        # The programs that are run have another working directory.
        print(build(package_of(args.deb).absolute(), args.into.absolute()))
    except InfiniswapError as error:
        print(f"container_image: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def package_of(debs: Sequence[Path]) -> Path:
    """The package that fits the image's system.

    Raises:
        UsageError: there is not exactly one.
    """
    fitting = [deb for deb in debs if _MADE_FOR in deb.name and deb.exists()]
    if len(fitting) != 1:
        raise UsageError(
            f"{len(fitting)} packages for Debian 12 instead of one",
            where="--deb",
            mend="Run `make deb` in a clean checkout, and name its package.",
        )
    return fitting[0]


def build(deb: Path, into: Path) -> Path:
    """Makes the image.

    Args:
        deb: the package that it gets.
        into: where the archive goes.

    Returns:
        The archive's path.

    Raises:
        NotPermittedError: not root.
        UnavailableError: a program is missing.
        SystemCallError: a step fails.
    """
    if os.geteuid() != 0:
        raise NotPermittedError("a system in a directory takes root", mend="Use sudo.")
    for program, package in _TOOLS.items():
        if shutil.which(program) is None:
            raise UnavailableError(f"{program} is missing", mend=f"apt-get install {package}")
    version = _field(deb, "Version")
    archive = into / f"{NAME}-{version}.oci.tar"
    with tempfile.TemporaryDirectory(prefix="infiniswap-image-", dir="/var/tmp") as directory:
        root = Path(directory, "root")
        _make_root(deb, root)
        into.mkdir(parents=True, exist_ok=True)
        archive.unlink(missing_ok=True)
        _pack(root, archive, version)
    return archive


def _field(deb: Path, name: str) -> str:
    return run_command(["dpkg-deb", "--field", str(deb), name]).strip()


def _make_root(deb: Path, root: Path) -> None:
    """A minimal system with the package in it; nothing is fetched from inside."""
    needed = [part.split()[0] for part in _field(deb, "Depends").split(",")]
    run_command(
        [
            "debootstrap", "--variant=minbase", f"--include={','.join(needed)}", _SUITE, str(root),
        ],
        timeout_s=_BUILD_S,
    )  # fmt: skip
    # The package would take the next free number; manifests have to name one.
    number = str(USER_ID)
    run_command(["chroot", str(root), "groupadd", "--gid", number, _USER])
    home = ["--home-dir", "/var/lib/infiniswapd", "--shell", "/usr/sbin/nologin"]
    run_command(["chroot", str(root), "useradd", "--uid", number, "--gid", number, *home, _USER])
    inside = root / deb.name
    shutil.copyfile(deb, inside)
    run_command(["chroot", str(root), "dpkg", "--install", f"/{deb.name}"], timeout_s=_BUILD_S)
    inside.unlink()
    for path in _NOT_NEEDED:
        shutil.rmtree(root / path, ignore_errors=True)
    # Each container has its own; the host's is mounted over it where the donor's name matters.
    (root / "etc/machine-id").write_bytes(b"")
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)


def _pack(root: Path, archive: Path, version: str) -> None:
    made_s = os.environ.get("SOURCE_DATE_EPOCH", "315532800")
    container = run_command(["buildah", "from", "scratch"]).strip()
    try:
        run_command(["buildah", "copy", "--quiet", container, str(root), "/"], timeout_s=_BUILD_S)
        labels = {**_LABELS, "org.opencontainers.image.version": version}
        options = [text for label in labels.items() for text in ("--label", "=".join(label))]
        entry = ["--entrypoint", f'["/usr/bin/{NAME}"]', "--cmd", "daemon", "--port", "9400"]
        run_command(["buildah", "config", *entry, *options, container])
        target = f"oci-archive:{archive}:{NAME}:{version.replace('~', '-').replace('+', '-')}"
        commit = [
            "buildah",
            "commit",
            "--quiet",
            "--disable-compression=false",
            "--timestamp",
            made_s,
            container,
            target,
        ]
        run_command(commit, timeout_s=_BUILD_S)
    finally:
        run_command(["buildah", "rm", container])


if __name__ == "__main__":
    sys.exit(main())
