# SPDX-License-Identifier: Apache-2.0
"""Under a systemd: a device's unit on a host with a TPM, started, stopped and started again.

python tpm_probe.py DIRECTORY
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from infiniswap.secret import HOST_KEY_BYTES
from infiniswap.system.tpm import Tpm

NAME = "kept"
UNIT = f"infiniswap-device@{NAME}.service"
CONFIG = Path("/etc/infiniswap")
PATTERN = b"what is kept" * 1000


def run(*argv: str) -> str:
    print("+", *argv, flush=True)
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=900)
    print(done.stdout, done.stderr, flush=True)
    assert done.returncode == 0, argv
    return done.stdout


def main(directory: Path) -> None:
    (CONFIG / "devices").mkdir(parents=True)
    run(sys.executable, "-m", "infiniswap", "init", "--secret", str(CONFIG / "secret"))
    (CONFIG / "infiniswap.toml").write_text(
        f'[cluster]\nsecret_file = "{CONFIG}/secret"\n'
        f'[daemon]\nlisten = "127.0.0.1:9471"\npool = "64M"\nslab = "8M"\nheadroom = "16M"\n'
        f'[device]\nslab = "8M"\nbackup_dir = "{directory}"\n'
    )
    (CONFIG / "devices" / f"{NAME}.env").write_text(
        "DEVICE_OPTIONS=--size 16M --frontend nbd --donors 127.0.0.1:9471\n"
    )
    run(sys.executable, "-m", "infiniswap", "service", "install")
    log = Path(f"/run/systemd/system/{UNIT}.d")
    log.mkdir()
    (log / "log.conf").write_text(f"[Service]\nStandardError=append:{directory}/log\n")
    run("systemctl", "daemon-reload")
    node = Path("/dev/infiniswap", NAME)
    seen: dict[str, object] = {}
    try:
        run("systemctl", "start", "infiniswapd.service", UNIT)
        node.write_bytes(PATTERN)
        seen["keys"] = sorted(path.name for path in directory.glob("*key*"))
        run("systemctl", "stop", UNIT)
        sealed = (directory / "host-key.tpm").read_bytes()
        seen["plain"] = bytes(Tpm().open(sealed, HOST_KEY_BYTES)).hex()
        run("systemctl", "start", UNIT)
        seen["same"] = node.read_bytes()[: len(PATTERN)] == PATTERN
        seen["doctor"] = subprocess.run(
            [sys.executable, "-m", "infiniswap", "doctor"], capture_output=True, text=True
        ).stdout
        run("systemctl", "stop", UNIT)
    finally:
        print((directory / "log").read_text(), flush=True)
        print(f"SEEN {json.dumps(seen)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
