# SPDX-License-Identifier: Apache-2.0
"""Commands that ask a donor which wants their terminal or their memory."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.donors.donor_world import client_config
from support.donors.hostile_donor import EVIL, HostileDonor, hostile, hostile_beside, lease, status
from support.messages import texts

from infiniswap.cli.main import main
from infiniswap.control.client import fetch_status
from infiniswap.control.messages import MESSAGE_BYTES_MAX
from infiniswap.errors import ProtocolMismatchError

SIZE = 54 * 1000 * 1000
"""Of an answer that once took 625 MB to read."""


@pytest.fixture
def donor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secret_file: Path
) -> Iterator[HostileDonor]:
    monkeypatch.setenv("INFINISWAP_CLUSTER_SECRET_FILE", str(secret_file))
    monkeypatch.setenv("INFINISWAP_DEVICE_RUN_DIR", str(tmp_path))  # no device of this host's
    monkeypatch.setenv("INFINISWAP_DEVICE_BACKUP_DIR", str(tmp_path))
    with hostile_beside() as made:
        yield made


def told(donor: HostileDonor, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["status", "--config", "/dev/null", "--donors", str(donor.address), *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "said",
    [
        status(degraded=[EVIL]),
        status(donor_name=EVIL),
        status(software=EVIL),
        status(memory__source=EVIL),
        status(counters={f"{EVIL}_errors": 1}),
        status(leases=[lease(device_name=EVIL)]),
        status(leases=[lease(address=EVIL)]),
        status(leases=[lease(state=EVIL)]),
        status(leases=[lease(host_name="evil\u200b\u00adhost", device_name="\u061cname")]),
        status(donor_id=EVIL),
        {EVIL: EVIL},
    ],
)
def test_no_text_of_a_donor_moves_the_terminal(
    said: object, donor: HostileDonor, capsys: pytest.CaptureFixture[str]
) -> None:
    donor.body = json.dumps(said).encode()
    for line in told(donor, capsys).splitlines():
        assert line.isprintable(), ascii(line)
    shown = json.loads(told(donor, capsys, "--json"))
    assert all(text.isprintable() for text in texts(shown))


def test_no_text_of_a_donor_is_markup(
    donor: HostileDonor, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = lease(state="[/red]", device_name="[bold]", host_name="[link=x]")
    donor.body = json.dumps(status(leases=[odd], donor_name="[red]")).encode()
    shown = told(donor, capsys)
    for text in ("[/red]", "[bold]", "[link=x]", "[red]"):
        assert text in shown


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (json.dumps(status(degraded=["x" * 500] * (SIZE // 502))).encode(), {}),
        (json.dumps(status()).encode().ljust(MESSAGE_BYTES_MAX + 1), {}),
        (
            zlib.compress(json.dumps(status()).encode() + b" " * SIZE),
            {"Content-Encoding": "deflate"},
        ),
    ],
    ids=["large", "just too large", "deflated"],
)
async def test_an_answer_beyond_the_limit_is_not_held(body: bytes, headers: dict[str, str]) -> None:
    async with hostile() as donor:
        donor.body = body
        donor.headers |= headers
        config = client_config(connect_s=60.0)
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolMismatchError):
                await fetch_status(donor.address, config)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 16 * MESSAGE_BYTES_MAX
