# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of real daemons and devices: complete, in step with `status`, for whom it may be."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, Donor, run, unhurried, until
from support.documents import marked

from infiniswap.control.tls import client_context
from infiniswap.device.process import metrics as device_metrics
from infiniswap.donor import metrics as donor_metrics
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

ANY_PORT = {"INFINISWAP_DEVICE_METRICS_LISTEN": "127.0.0.1:0"}


TOKEN = secrets.token_hex(16)
TOKEN_FILE = "INFINISWAP_CLUSTER_METRICS_TOKEN_FILE"


def get(port: int, path: str = "/metrics", token: str = TOKEN) -> tuple[int, str]:
    """Status and body."""
    return unhurried(lambda: _get(port, path, token))


def _get(port: int, path: str, token: str) -> tuple[int, str]:
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=WAIT_S, context=client_context()
    )
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def port_of(device: Device) -> int:
    """Where it says that its metrics are; of the last of its processes."""
    found = until(lambda: re.findall(r"metrics at https://127.0.0.1:(\d+)/", device.log), "a port")
    return int(found[-1])


def key(name: str, /, **labels: str) -> str:
    """One series, as `samples` names it."""
    return f"infiniswap_{name} {sorted(labels.items())}"


def samples(text: str) -> dict[str, float]:
    """By series, whatever order its labels have on the page."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"infiniswap_(\w+)(?:{(.*)})? (\S+)$", line):
            found[key(match[1], **dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")))] = float(
                match[3]
            )
    return found


def families(text: str) -> list[str]:
    return re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)


def metrics_token(cluster: Cluster) -> Path:
    """The token's file."""
    path = cluster.root / "metrics-token"
    path.touch(0o600)
    path.write_text(TOKEN)
    return path


@pytest.fixture
def device(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Device]:
    cluster.env[TOKEN_FILE] = str(metrics_token(cluster))
    cluster.donor()
    # A machine that is slow must not count as a donor that is dead, where none is.
    patient = {"INFINISWAP_DEVICE_REQUEST_MS": "60000"} if "step_with" in request.node.name else {}
    device = cluster.start("--frontend", "nbd-socket", size="64M", **ANY_PORT, **patient)
    yield device
    assert "Traceback" not in device.log


def test_both_export_all_that_is_declared_in_step_with_status(
    cluster: Cluster, device: Device, tmp_path: Path
) -> None:
    original = tmp_path / "in"
    original.write_bytes(os.urandom(32 * MIB))
    run("nbdcopy", "--flush", original, device.uri)
    until(lambda: device.status["slabs"]["mapped"], "a slab on a donor")
    run("nbdcopy", "--flush", original, device.uri)
    run("nbdcopy", device.uri, tmp_path / "out")

    (donor,) = cluster.donors
    of_device, of_donor, told = until(lambda: _settled(device, donor), "an end of all copies")
    for (status, text), metrics in (
        (of_device, device_metrics.METRICS),
        (of_donor, donor_metrics.METRICS),
    ):
        assert status == 200
        assert families(text) == [metric.name for metric in metrics]

    found, stats, name = samples(of_device[1]), told["stats"], device.name
    for source in ("remote", "staging", "backup", "zero"):
        pages = found[key("device_pages_in_total", device=name, source=source)]
        assert pages == stats[f"pages_in_{source}"]
        in_bytes = found[key("device_in_bytes_total", device=name, source=source)]
        assert in_bytes == pages * PAGE_BYTES
    assert found[key("device_pages_out_total", device=name)] == stats["pages_out"] > 0
    at = {"device": name, "donor": donor.address, "transport": "tcp"}
    written = found[key("device_donor_written_pages_total", **at)]
    assert written == sum(row["write_pages"] for row in told["donors"]) > 0
    assert found[key("device_donor_connected", **at)] == 1
    for target, op in (("remote", "read"), ("remote", "write"), ("backup", "write")):
        labels = {"device": name, "target": target, "op": op}
        assert found[key("device_transfer_duration_seconds_count", **labels)] > 0, labels
    reads = found[key("device_request_duration_seconds_count", device=name, op="read")]
    assert reads == stats["read_requests"]

    # What the donor says that it gave and took is what the device says that it got and sent.
    lent = samples(of_donor[1])
    (lease,) = [series for series in lent if "donor_lease_read_bytes_total" in series]
    assert name in lease
    got = found[key("device_donor_read_bytes_total", **at)]
    assert lent[lease] == lent[key("donor_read_bytes_total")] == got > 0
    assert lent[key("donor_pool_slabs", state="mapped")] > 0


def _settled(device: Device, donor: Donor) -> Any:
    """Both pages and a status between which nothing moved, else None."""
    before = get(port_of(device))
    of_donor, told = get(donor.control), device.status
    after = get(port_of(device))

    def moved(answer: tuple[int, str]) -> dict[str, float]:
        return {name: value for name, value in samples(answer[1]).items() if "bytes_total" in name}

    return (after, of_donor, told) if moved(before) == moved(after) else None


def test_a_silent_donor_and_a_busy_device_keep_no_scrape_waiting(
    cluster: Cluster, device: Device
) -> None:
    """While a donor stands still, requests wait for it and are turned away from it."""
    (donor,) = cluster.donors
    port, name = port_of(device), device.name
    at = {"device": name, "donor": donor.address}
    run("nbdcopy", "--flush", _data(cluster), device.uri)
    until(lambda: device.status["slabs"]["mapped"], "a slab on a donor")
    written = key("device_donor_written_pages_total", **at, transport="tcp")
    run("nbdcopy", "--flush", _data(cluster), device.uri)
    until(lambda: samples(get(port)[1]).get(written, 0) > 0, "pages that were sent to it")
    writer = subprocess.Popen(["nbdcopy", "--flush", str(_data(cluster)), device.uri])
    donor.send(signal.SIGSTOP)
    try:
        lost = key("device_donor_connections_lost_total", **at)
        until(lambda: samples(get(port)[1])[lost] >= 1, "the donor to be noticed")
        given_up = key("device_donor_given_up_total", **at)
        until(lambda: samples(get(port)[1])[given_up] == 1, "the donor to be given up")
        seen = samples(get(port)[1])
        assert seen[key("device_slabs", device=name, state="mapped")] == 0
        # What it had moved before is still told.
        assert seen[written] > 0
        assert writer.wait(WAIT_S) == 0
    finally:
        donor.send(signal.SIGCONT)
        writer.kill()
        writer.wait()


def _data(cluster: Cluster) -> Path:
    path = cluster.root / "data"
    if not path.exists():
        path.write_bytes(os.urandom(48 * MIB))
    return path


@pytest.mark.requires_tool("curl")
def test_only_the_token_opens_them_and_it_opens_nothing_else(
    cluster: Cluster, secret_file: Path
) -> None:
    """It is made, and shown, as docs/metrics.md says."""
    make, show = (block.body for block in marked(Path("docs/metrics.md"), "on", "prometheus"))
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    path = cluster.root / "metrics-token"
    cluster.env[TOKEN_FILE] = str(path)
    assert "/etc/infiniswap/metrics-token" in make
    _shell(make.replace("/etc/infiniswap", str(cluster.root)))
    token = path.read_text().strip()
    donor = cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size="64M", **ANY_PORT)
    port = port_of(device)
    for shown, here in (
        ("/etc/infiniswap", cluster.root),
        ("/etc/prometheus/infiniswap-donors.crt", donor.state_dir / "donor.crt"),
        ("infiniswap-donor:9400:10.0.0.2:9400", f"infiniswap-donor:9400:{donor.address}"),
        ("/etc/prometheus/infiniswap-devices.crt", cluster.backup_dir / "metrics.crt"),
        ("infiniswap-device:9402:10.0.0.4:9402", f"infiniswap-device:9402:127.0.0.1:{port}"),
        ("/run/infiniswap/NAME", device.run),
    ):
        assert shown in show
        show = show.replace(shown, str(here))
    names = [metric.name for metric in donor_metrics.METRICS]
    names += 2 * [metric.name for metric in device_metrics.METRICS]  # at the port, at the socket
    assert families(_shell(show)) == names
    for asked in (donor.control, port):
        assert get(asked, token=token)[0] == 200
        for wrong in ("", "wrong", token[:-1], secret_file.read_text().strip()):
            status, text = get(asked, token=wrong)
            assert status == 401, wrong
            assert "Bearer" in text
    for closed in ("/v1/status", "/v1/openapi.json"):
        assert get(donor.control, closed, token)[0] == 401
    assert get(port, "/v1/device", token)[0] == 404


def _shell(text: str) -> str:
    """What the commands print."""
    return run("bash", "-c", f"set -euo pipefail\n{text}")


def test_a_port_that_cannot_be_had_is_an_error_before_anything_is_attached(
    cluster: Cluster,
) -> None:
    cluster.donor()
    token = str(metrics_token(cluster))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen, token_file, problem in (
            (f"127.0.0.1:{port}", token, "the port is in use"),
            ("127.0.0.1:0", "", "metrics token"),
            ("0.0.0.0:9402", "", "metrics token"),
            ("192.0.2.1:9402", "", "metrics token"),
            ("no such host:9402", token, "metrics_listen"),
        ):
            cluster.env[TOKEN_FILE] = token_file
            command = ["device", "start", cluster.name(), "--size", "64M"]
            command += ["--donors", cluster.addresses, "--frontend", "nbd-socket"]
            done = cluster.cli(*command, "--metrics-listen", listen)
            assert done.returncode not in (0, 1), done.stderr
            assert problem in done.stderr
            assert "Traceback" not in done.stderr
    assert cluster.names() == []
    # The certificate is the host's, as its key is.
    left = {path.name for path in cluster.backup_dir.glob("*")}
    assert left == {"metrics.pem", "metrics.crt"}


@pytest.mark.requires_root
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
def test_a_successor_serves_them_at_the_same_port(cluster: Cluster) -> None:
    cluster.env[TOKEN_FILE] = str(metrics_token(cluster))
    cluster.donor()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"127.0.0.1:{port}"
    device = cluster.start(
        "--frontend", "fuse", "--metrics-listen", listen, INFINISWAP_DEVICE_STANDBY="on"
    )
    started = key("device_start_time_seconds", device=device.name)
    before = samples(get(port)[1])
    device.wait_standby()
    until(lambda: _ready(port, device), "a standby to be told of")
    os.kill(device.pid, signal.SIGKILL)
    device.wait_take_over(1)
    after = samples(until(lambda: _again(port), "the successor's page"))
    assert before[started] < after[started] <= time.time()
    assert after[key("device_take_overs_total", device=device.name)] == 1


def _ready(port: int, device: Device) -> bool:
    return samples(get(port)[1])[key("device_standby_ready", device=device.name)] == 1


def _again(port: int) -> str | None:
    try:
        status, text = get(port)
    except OSError:
        return None
    return text if status == 200 else None
