# SPDX-License-Identifier: Apache-2.0
"""`infiniswap doctor --report`: it tells the hardware, and nothing of whose it is."""

from __future__ import annotations

import ipaddress
import json
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.configs import configured
from support.devices.device_status import device_status
from support.machine.made_host import make_files
from support.machine.ran import ran

from infiniswap.cli.doctor import report
from infiniswap.cli.doctor.finding import good
from infiniswap.device.api import DonorRow
from infiniswap.system import hardware
from infiniswap.units import PAGE_BYTES

# --------------------------------------------------------------------------- hardware


def link(path: Path, to: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)


def test_cards_are_described_without_a_word_of_whose_they_are(tmp_path: Path) -> None:
    pci = "devices/pci0/0000:01:00.0"
    make_files(
        tmp_path,
        {
            f"{pci}/vendor": "0x15b3\n",
            f"{pci}/device": "0x101d\n",
            "drivers/mlx5_core/x": "",
            "class/net/eth-of-alice/speed": "100000\n",
            "class/net/eth-of-alice/mtu": "9000\n",
            "class/net/eth-of-alice/address": "aa:bb:cc:dd:ee:ff\n",
            "class/net/bridge0/mtu": "1500\n",
            "class/net/eth1/mtu": "1500\n",
            "class/net/eth1/speed": "-1\n",
            "class/infiniband/mlx5_0/fw_ver": "22.39.1002\n",
            "class/infiniband/mlx5_0/board_id": "MT_0000000359\n",
            "class/infiniband/mlx5_0/node_guid": "9803:9b03:00aa:bbcc\n",
            "class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
            "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)\n",
            "class/infiniband/rxe0/parent": "eth1\n",
        },
    )
    link(tmp_path / pci / "driver", str(tmp_path / "drivers/mlx5_core"))
    for name in ("net/eth-of-alice", "net/eth1", "infiniband/mlx5_0"):
        link(tmp_path / "class" / name / "device", str(tmp_path / pci))
    card, soft = hardware.rdma_cards(sys=tmp_path)
    port = hardware.RdmaPortHardware("Ethernet", "ACTIVE", "100 Gb/sec (4X EDR)")
    assert card == hardware.RdmaCard(
        "mlx5_core", "15b3:101d", "MT_0000000359", "22.39.1002", (port,)
    )
    assert soft == hardware.RdmaCard("rdma_rxe", "", "", "", ())
    assert hardware.network_cards(sys=tmp_path) == (
        hardware.NetworkCard("mlx5_core", "15b3:101d", 100_000, 9000),
        hardware.NetworkCard("mlx5_core", "15b3:101d", None, 1500),
    )


def test_a_machine_without_any_of_it_is_described_too(tmp_path: Path) -> None:
    found = hardware.machine(proc=tmp_path, sys=tmp_path, os_release=tmp_path / "none")
    assert (found.model, found.system, found.processor, found.is_guest) == ("", "", "", False)
    assert hardware.network_cards(sys=tmp_path) == ()
    assert hardware.rdma_cards(sys=tmp_path) == ()


def test_a_machine_is_described(tmp_path: Path) -> None:
    make_files(
        tmp_path,
        {
            "cpuinfo": "model name\t: A Processor\nflags\t\t: fpu hypervisor\n\nmodel name\t: B\n",
            "class/dmi/id/product_name": "Server 3\n",
            "os-release": 'NAME="x"\nPRETTY_NAME="Some Linux 9"\n',
        },
    )
    found = hardware.machine(proc=tmp_path, sys=tmp_path, os_release=tmp_path / "os-release")
    assert (found.model, found.system) == ("Server 3", "Some Linux 9")
    assert (found.processor, found.is_guest) == ("A Processor", True)


# ----------------------------------------------------------------------------- privacy


@given(address=st.ip_addresses(), before=st.sampled_from(["", "donor ", "(", "at "]))
@example(address=ipaddress.ip_address("::1"), before="")
@example(address=ipaddress.ip_address("::ffff:10.0.0.1"), before="")
def test_no_address_is_left(address: ipaddress.IPv4Address, before: str) -> None:
    for text in (str(address), address.exploded, f"{address}:9400", f"[{address}]:9400"):
        cleaned = report.cleaner(())(f"{before}{text} is away")
        assert str(address) not in cleaned
        assert address.exploded not in cleaned
        assert cleaned.startswith(before)
        assert cleaned.endswith(" is away")


def test_names_and_paths_are_taken_out_and_nothing_else() -> None:
    clean = report.cleaner(["vm", "db1.example.com", "db1", ""])
    said = "DB1 and db1.example.com: aa:bb:cc:dd:ee:ff; see /home/alice/x.toml, vm"
    assert clean(said) == "NAME and NAME: ADDRESS; see FILE, NAME"
    kept = "vm.swappiness is 60; echo N > /sys/module/zswap/parameters/enabled; db12; 6.12.3; 12:30"
    assert clean(kept) == kept
    assert report.cleaner([""])("x") == "x"


def donor(name: str) -> DonorRow:
    return DonorRow(
        address=f"{name}.example.com:9400",
        name=name,
        state="mapped",
        detail=f"lease 5e11 of {name}",
        slabs=2,
        read_pages=3,
        write_pages=4,
        errors=0,
        transport="tcp",
        transport_reason=f"{name}.example.com does not answer at fe80::1",
    )


def test_a_device_tells_its_figures_and_not_its_donors() -> None:
    stats = {"pages_in_remote": 5, "pages_in_staging": 1, "pages_in_backup": 0, "pages_out": 7}
    changes = {"device_id": "5eca", "path": "/dev/nbd77", "stats": stats}
    status = device_status(**changes, donors=[donor("alice"), donor("bob")])
    text = json.dumps(report.device(status, report.cleaner(report._names(configured(), [status]))))
    told = json.loads(text)
    assert told["in_bytes"] == {"donors": 5 * PAGE_BYTES, "staging": PAGE_BYTES, "backup": 0}
    assert [row["read_bytes"] for row in told["donors"]] == [3 * PAGE_BYTES] * 2
    assert told["donors"][0]["transport_reason"] == "NAME does not answer at ADDRESS"
    for word in ("alice", "bob", "example.com", "5e11", status.path, status.device_id):
        assert word not in text


def test_findings_about_files_donors_and_secrets_tell_their_state_alone() -> None:
    findings = [good(name, "words of ours") for name in ("fuse", "secret", "donors", "backup", "x")]
    told = [report._finding(found, str) for found in findings]
    assert told[0] == {"name": "fuse", "state": "ok", "what": "words of ours"}
    assert [sorted(row) for row in told[1:]] == [["name", "state"]] * 4


@pytest.mark.requires_root
@pytest.mark.requires_native
@pytest.mark.requires_tool("unshare", "hostname")
def test_the_report_of_this_host_has_none_of_its_names_and_addresses() -> None:
    report_of = "-m infiniswap doctor --report --donors 127.0.0.77:1"
    command = f'hostname of-a-test && exec "$0" {report_of}'
    done = ran("unshare", "--uts", "sh", "-c", command, sys.executable)
    assert done.returncode in (0, 5), done.stderr
    told = json.loads(done.stdout)
    assert {"host", "donors"} <= {found["name"] for found in told["findings"]}
    assert told["machine"]["processors"] > 0
    for word in ("of-a-test", "127.0.0", "/root", "/home"):
        assert word not in done.stdout
