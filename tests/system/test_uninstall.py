# SPDX-License-Identifier: Apache-2.0
"""What is left of an installation that was used: nothing but what somebody would miss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.devices.cluster import Cluster

from infiniswap.errors import ConflictError
from infiniswap.system.service_units import COPIES_DIR, DAEMON_UNIT, UNIT_DIR

pytestmark = pytest.mark.requires_native


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a directory: mode and contents by path."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            contents = b"" if path.is_dir() or path.is_symlink() else path.read_bytes()
            found[str(path.relative_to(root))] = (path.lstat().st_mode, contents)
    return found


def name_files(config: Path) -> set[str]:
    """Writes the files that the documents tell to put beside a configuration, and names them in
    it; returns where they lie below the root."""
    text = config.read_text().replace('#tls = "off"', 'tls = "on"')
    text = text.replace('#username = ""', 'username = "infiniswap"')
    found = set()
    for key, name in (
        ("secret_file", "cluster-secret"),
        ("metrics_token_file", "metrics-token"),
        ("peers_file", "peers"),
        ("password_file", "mqtt-password"),
        ("ca_file", "tls/ca.pem"),
    ):
        path = config.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("contents\n")
        before, line, after = text.rpartition(f'\n#{key} = ""\n')  # [mqtt] is the last section
        assert line
        text = f'{before}\n{key} = "/etc/infiniswap/{name}"\n{after}'
        found.add(f"etc/infiniswap/{name}")
    config.write_text(text)
    return found


def test_nothing_is_left_of_an_installation_that_was_used(cluster: Cluster) -> None:
    root = cluster.root / "host"
    for name in ("etc/systemd/system", "etc/modules-load.d", "etc/sysctl.d", "usr/lib", "run"):
        (root / name).mkdir(parents=True)
    (root / "etc/fstab").write_text("# none\n")
    (root / "var/lib").mkdir(parents=True)
    before = tree(root)

    cluster.ok("service", "install", "--root", str(root))
    config = root / "etc/infiniswap/infiniswap.toml"
    cluster.ok("init", "--config", str(config))
    (config.parent / "devices").mkdir()
    named = name_files(config)
    (config.parent / "notes.txt").write_text("an administrator's\n")
    wants = root / UNIT_DIR / "multi-user.target.wants"
    wants.mkdir()
    (wants / DAEMON_UNIT).symlink_to(root / UNIT_DIR / DAEMON_UNIT)
    cluster.run_dir, cluster.backup_dir = root / "run/infiniswap", root / "var/lib/infiniswap"
    token = cluster.root / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    cluster.env |= {
        "INFINISWAP_DEVICE_RUN_DIR": str(cluster.run_dir),
        "INFINISWAP_DEVICE_BACKUP_DIR": str(cluster.backup_dir),
        "INFINISWAP_DAEMON_STATE_DIR": str(root / "var/lib/infiniswapd"),
        "INFINISWAP_DAEMON_RUN_DIR": str(root / "run/infiniswapd"),
        "INFINISWAP_DEVICE_METRICS_LISTEN": "127.0.0.1:0",
        "INFINISWAP_CLUSTER_METRICS_TOKEN_FILE": str(token),
    }
    donor = cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size="16M")
    (config.parent / "devices" / f"{device.name}.env").write_text("DEVICE_OPTIONS=--swap\n")
    refused = cluster.cli("service", "uninstall", "--purge", "--root", str(root))
    assert refused.returncode == ConflictError.exit_code
    assert f"infiniswap device stop {device.name}" in refused.stderr
    device.stop()
    assert donor.end() == 0

    copies = root / COPIES_DIR
    copies.mkdir(parents=True)
    (copies / "cluster.secret_file").touch(mode=0o400)
    would = cluster.ok("service", "uninstall", "--dry-run", "--root", str(root))
    assert f"would remove: {copies}" in would
    said = cluster.ok("service", "uninstall", "--root", str(root))
    assert f"removed: {copies}" in said
    left = set(tree(root)) - set(before)
    assert left == {
        "etc/infiniswap",
        "etc/infiniswap/infiniswap.toml",
        "etc/infiniswap/devices",
        f"etc/infiniswap/devices/{device.name}.env",
        *named,
        "etc/infiniswap/tls",
        "etc/infiniswap/notes.txt",
        "var/lib/infiniswap",
        *(f"var/lib/infiniswap/{name}" for name in ("host-key", "metrics.pem", "metrics.crt")),
        *(
            f"var/lib/infiniswap/{device.name}.{kind}"
            for kind in ("backup", "device", "key", "tables")
        ),
        "var/lib/infiniswapd",
        *(f"var/lib/infiniswapd/{name}" for name in ("donor.pem", "donor.crt", "host-secret")),
    }
    assert f"left in place: {config.parent} (settings" in said
    assert f"left in place: {cluster.backup_dir} (contents" in said
    assert f": notes.txt in {config.parent}; remove them by hand" in said

    would = cluster.ok("service", "uninstall", "--purge", "--dry-run", "--root", str(root))
    assert f"would remove: {device.backup.name}" in would.replace(f"{cluster.backup_dir}/", "")
    assert set(tree(root)) - set(before) == left
    said = cluster.ok("service", "uninstall", "--purge", "--root", str(root))
    assert set(tree(root)) - set(before) == {"etc/infiniswap", "etc/infiniswap/notes.txt"}
    assert [line for line in said.splitlines() if "left in place" in line] == [
        "left in place, because they do not belong to Infiniswap and its configuration does not "
        f"name them: notes.txt in {config.parent}; remove them by hand if they are not needed"
    ]
    (config.parent / "notes.txt").unlink()
    cluster.ok("service", "uninstall", "--purge", "--root", str(root))
    assert tree(root) == before
