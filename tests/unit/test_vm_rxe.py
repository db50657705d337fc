# SPDX-License-Identifier: Apache-2.0
"""`tools/vm --rxe`: what is missing, what the demo makes of its figures; and the
files of vagrant/."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from qemu_vm import commands, rxe
from qemu_vm.rxe_guest import this_host
from qemu_vm.rxe_results import Cpu, Donor, Results, lines, problems
from support.machine.ran import ran

from infiniswap.errors import UnavailableError, UsageError
from infiniswap.units import MIB, PAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
VAGRANT = ROOT / "vagrant"


# -------------------------------------------------------------------------- arguments


def test_what_is_missing_is_told_in_one_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = shutil.which("true") or ""

    def find(program: str) -> str:
        if program == "ip":
            return there
        raise UnavailableError(f"no {program}")

    monkeypatch.setattr(commands, "find", find)
    monkeypatch.setattr(rxe, "PROVIDER", tmp_path / "rxe.driver")
    assert rxe.missing() == ["gcc", "ibverbs-providers", "iproute2"]
    with pytest.raises(UnavailableError, match="apt-get install gcc ibverbs-providers iproute2"):
        rxe.check(3)


def test_the_last_machine_is_the_consumer() -> None:
    environ = {"INFINISWAP_VM_HOSTS": "h1 h2 h3", "INFINISWAP_VM_HOST": "h2", "PATH": "/bin"}
    host = this_host(environ)
    assert (host.role, host.env["INFINISWAP_VM_ROLE"]) == ("donor", "donor")
    assert host.env["PATH"].endswith(":/bin")
    assert this_host({**environ, "INFINISWAP_VM_HOST": "h3"}).is_consumer
    for change in ({"INFINISWAP_VM_HOST": ""}, {"INFINISWAP_VM_HOSTS": "h2"}):
        with pytest.raises(UsageError, match="--hosts N --rxe"):
            this_host({**environ, **change})


# ---------------------------------------------------------------------------- results


def donor(address: str = "10.88.0.1:9400", pages: int = 1000) -> Donor:
    return Donor(
        address, "rdma", "", 2, pages, 500, Cpu(10, 0.0005, 1, 2, 3), Cpu(5, 0, 0.5, 0, 0.1)
    )


def results(*donors: Donor) -> Results:
    summary = {
        "exit_code": 0,
        "local_bytes": 24 * MIB,
        "page_in_bytes": 4000 * PAGE_BYTES,
        "page_in_remote_bytes": 3000 * PAGE_BYTES,
        "page_in_staging_bytes": 250 * PAGE_BYTES,
        "page_in_backup_bytes": 750 * PAGE_BYTES,
        "page_out_bytes": 1000 * PAGE_BYTES,
    }
    return Results(12288, 0, "ublk", summary, donors)


def test_the_closing_lines_have_every_figure() -> None:
    text = "\n".join(lines(results(donor(), donor("10.88.0.2:9400", 3000))))
    for part in (
        "12288 pages of a job of 48.0 MiB with 24.0 MiB of memory: 0 wrong",
        "by ublk: 75.0% from 2 donors, 6.2% from staging, 18.8% from the disk",
        "25.0%",
        "75.0%",
        "softirq",
    ):
        assert part in text
    rows = [line.split("  ") for line in text.splitlines() if line.startswith("10.88.0.1")]
    transport, job = [[cell.strip() for cell in row if cell] for row in rows]
    assert transport == ["10.88.0.1:9400", "rdma", "2", "3.91 MiB", "1.95 MiB", "25.0%"]
    assert job == ["10.88.0.1:9400, job (10 s)", "0.5 ms", "10.0%", "20.0%", "30.0%"]


def test_what_the_demo_has_to_show() -> None:
    good = donor()
    assert problems(results(good)) == []
    wrong = dataclasses.replace(results(good), wrong=3)
    by_tcp = dataclasses.replace(good, transport="tcp", reason="the port is down")
    unused = dataclasses.replace(good, read_pages=0)
    busy = dataclasses.replace(good, cpu=Cpu(10, 0.15, 0, 0, 0))
    failed = dataclasses.replace(results(good), summary={**results(good).summary, "exit_code": 137})
    for found, word in (
        (wrong, "3 of 12288 pages were wrong"),
        (results(good, by_tcp), "reached by tcp: the port is down"),
        (results(unused), "did not hold any page"),
        (results(busy), "spent 0.150 s on 1500 pages"),
        (failed, "exit code 137"),
    ):
        (problem,) = problems(found)
        assert word in problem


# ---------------------------------------------------------------------------- vagrant


def test_each_script_is_run_by_vagrant_and_by_us() -> None:
    names = {path.name for path in (VAGRANT / "provision").iterdir()}
    vagrantfile = (VAGRANT / "Vagrantfile").read_text()
    ours = (ROOT / "tools/qemu_vm/rxe_guest.py").read_text()
    assert names == set(re.findall(r'host\.script\("([\w.]+)"', ours))
    roles = set(re.findall(r'provision\.call\(machine, \w+, "(\w+)"', vagrantfile))
    direct = set(re.findall(r'"provision/(\w+\.sh)"', vagrantfile))
    assert names == direct | {f"{role}.sh" for role in roles}


@pytest.mark.parametrize("name", ["install", "rxe", "donor", "consumer"])
def test_a_script_without_arguments_touches_nothing(name: str) -> None:
    done = ran("sh", VAGRANT / "provision" / f"{name}.sh", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0
    assert f"usage: {name}.sh" in done.stderr


_STUB = """
module Vagrant
  module Errors
    VagrantError = Class.new(StandardError)
  end
  class Recorder
    def initialize(path)
      @path = path
    end
    def method_missing(name, *args, **options)
      puts [@path, name, *args, options].join("|") unless args.empty? && options.empty?
      child = Recorder.new("#{@path}.#{name}")
      yield child if block_given?
      child
    end
  end
  def self.configure(_version)
    yield Recorder.new("config")
  end
end
load ARGV.shift
"""
"""Says what a Vagrantfile asks for."""


@pytest.mark.skipif(shutil.which("ruby") is None, reason="needs ruby, which is not installed")
@pytest.mark.parametrize("package", ["", "checkout", "nowhere.deb"])
def test_machines_get_the_package(tmp_path: Path, package: str) -> None:
    for name in ("stub.rb", "build/dist/infiniswap_1~deb12_amd64.deb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(_STUB)
    shutil.copytree(VAGRANT, tmp_path / "vagrant", ignore=shutil.ignore_patterns(".vagrant"))
    env = {"PATH": "/usr/bin:/bin", "PACKAGE": package, "DONORS": "1"}
    vagrant = ("ruby", tmp_path / "stub.rb", tmp_path / "vagrant/Vagrantfile")
    assert ran(*vagrant, "destroy", env=env).returncode == 0
    done = ran(*vagrant, "up", env=env)
    if package == "nowhere.deb":
        assert done.returncode != 0
        assert "no Debian package: run `make deb` in the checkout" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    copied = [line for line in done.stdout.splitlines() if "package0" in line]
    rsynced = [line for line in done.stdout.splitlines() if "rsync" in line]
    assert (len(copied), len(rsynced)) == ((0, 1) if package else (2, 0))
    source = "/opt/infiniswap-source" if package else "/tmp/infiniswap-packages"
    installs = [line for line in done.stdout.splitlines() if "provision/install.sh" in line]
    assert len(installs) == 2
    assert all(source in line for line in installs)
    assert all(f"{source}/infiniswap_1~deb12_amd64.deb" in line for line in copied)
    assert (f"rm -rf /tmp/infiniswap.secret {source}" in done.stdout) == (not package)


@pytest.mark.skipif(shutil.which("vagrant") is None, reason="needs vagrant, which is not installed")
def test_the_vagrantfile_is_valid(tmp_path: Path) -> None:
    place = tmp_path / "vagrant"
    shutil.copytree(VAGRANT, place, ignore=shutil.ignore_patterns(".vagrant"))
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VAGRANT_HOME": str(tmp_path / "v")}
    # Without a provider of machines here: their settings are libvirt's to judge.
    done = ran("vagrant", "validate", "--ignore-provider", cwd=place, env=env)
    assert "validated successfully" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
