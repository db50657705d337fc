# SPDX-License-Identifier: Apache-2.0
"""Root runs no code that others can write: what counts as others, and what a refusal says."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from pathlib import Path

import pytest
from support.machine.ran import ran

import infiniswap
from infiniswap.errors import NotPermittedError
from infiniswap.own_code import CODE_OWNER, check_own_code, trusted_users, writable_by
from infiniswap.system import programs

OWN = os.geteuid()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "code"
    found.mkdir(mode=0o755)
    found.chmod(0o755)
    return found


def test_what_is_ours_is_nobody_elses(path: Path) -> None:
    assert writable_by(path, {OWN}) == ""
    (path / "link").symlink_to("/nowhere")
    assert writable_by(path / "link", {OWN}) == "", "its directory says who may replace it"
    assert writable_by(path / "gone", {OWN}) == ""


def test_every_user_may_write_to_it(path: Path) -> None:
    path.chmod(0o757)
    assert "every user may write to it (mode 0757)" in writable_by(path, {OWN})
    path.chmod(0o1777)
    assert writable_by(path, {OWN}), "a module can be put into it"
    assert writable_by(path, {OWN}, is_way=True) == "", "what leads on is root's, and stays"


def test_it_belongs_to_another_user(path: Path) -> None:
    assert "it belongs to the user " in writable_by(path, {OWN + 1})


@pytest.mark.requires_root
def test_a_group_counts_by_its_members(path: Path) -> None:
    path.chmod(0o775)
    os.chown(path, -1, 54321)
    assert writable_by(path, {0}) == "", "nobody is in it"
    os.chown(path, -1, 65534)
    assert "members of its group may write to it: " in writable_by(path, {0})
    everybody = {entry.pw_uid for entry in pwd.getpwall()}
    assert writable_by(path, everybody) == ""


def test_a_user_who_called_sudo_is_trusted_and_so_is_one_who_is_named() -> None:
    assert trusted_users({}) == {0}
    assert trusted_users({"SUDO_UID": "1000"}) == {0, 1000}
    assert trusted_users({"SUDO_UID": "x", CODE_OWNER: "1001"}) == {0, 1001}


def test_programs_that_we_start_know_whose_checkout_it_is() -> None:
    assert programs.environment(base={"SUDO_UID": "7"}, settings=False)[CODE_OWNER] == "7"
    assert programs.environment(base={"SUDO_UID": "7", CODE_OWNER: "8"})[CODE_OWNER] == "8"
    assert CODE_OWNER not in programs.environment(base={})


def test_this_checkout_is_looked_at() -> None:
    with pytest.raises(NotPermittedError, match="others can change"):
        check_own_code({OWN + 12345})
    with pytest.raises(NotPermittedError) as failed:
        check_own_code({OWN + 12345}, for_unit=True)
    assert CODE_OWNER not in str(failed.value), "systemd would not have it"
    assert "/opt/infiniswap" in failed.value.mend


@pytest.mark.requires_root
def test_a_command_of_root_refuses_a_package_that_others_can_write(tmp_path: Path) -> None:
    package = tmp_path / "infiniswap"
    shutil.copytree(Path(infiniswap.__file__).parent, package)
    # Without the finder that leads to the checkout.
    program = (
        "import sys\n"
        "sys.meta_path = [one for one in sys.meta_path if not one.__module__.startswith('_ed')]\n"
        "from infiniswap.cli.main import main; exit(main())"
    )
    argv = ["env", "-C", "/", f"PYTHONPATH={tmp_path}", sys.executable, "-c", program]
    clean = {"PATH": os.environ["PATH"], CODE_OWNER: os.environ[CODE_OWNER]}
    module = package / "units.py"
    for mode, user in ((0o666, 0), (0o644, 1234)):
        done = ran(*argv, "status", "--donors", "127.0.0.1:1", env=clean)
        assert done.returncode == 0, done.stderr
        module.chmod(mode)
        os.chown(package, user, -1)
        done = ran(*argv, "status", "--donors", "127.0.0.1:1", env=clean)
        assert done.returncode == NotPermittedError.exit_code, done.stderr
        assert "root would run code that others can change" in done.stderr
        assert ran(*argv, "status", "--help", env=clean).returncode == 0
        module.chmod(0o644)
    os.chown(package, 0, -1)
    libraries = tmp_path / "infiniswap.libs"  # a wheel's, beside the package
    libraries.mkdir(mode=0o755)
    library = libraries / "libfuse3.so"
    library.touch(0o644)
    for path in (library, libraries):
        assert ran(*argv, "status", "--donors", "127.0.0.1:1", env=clean).returncode == 0
        path.chmod(0o777)
        done = ran(*argv, "status", "--donors", "127.0.0.1:1", env=clean)
        assert done.returncode == NotPermittedError.exit_code, done.stderr
        assert str(path) in done.stderr.replace("\n", "")
        path.chmod(0o755)
