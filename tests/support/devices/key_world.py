# SPDX-License-Identifier: Apache-2.0
"""A host on which a device's key goes its way, without the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.device_key import DeviceKey
from infiniswap.device.spec.spec import DeviceSpec, host_key_file
from infiniswap.system.tpm import Tpm
from support.configs import configured
from support.devices.seal_keys import KEY_BYTES, MemoryKeys
from support.devices.specs import device_spec


def value(key: DeviceKey) -> bytes:
    """The key itself."""
    return os.pread(key.fd, KEY_BYTES, 0)


class World:
    """A host on which one device is started and stopped."""

    def __init__(self, root: Path, tpm: Tpm | None = None) -> None:
        self.tpm = tpm or Tpm(node=root / "no TPM")
        self.keys = MemoryKeys()
        self.host_file = root / "backup" / "host-key"
        self._root = root
        (root / "backup").mkdir()
        self.paths = rundir.paths_of("d", root / "run", root / "backup")

    def spec(self, *, seal: bool = True, **changes: Any) -> DeviceSpec:
        config = configured(
            device__seal=seal,
            device__run_dir=str(self._root / "run"),
            device__backup_dir=str(self._root / "backup"),
            daemon__state_dir=str(self._root / "state"),
        )
        fields = {"backup": str(self.paths.backup), "host_key_file": host_key_file(config)}
        return device_spec(config, **{**fields, **changes})

    def key(self) -> DeviceKey:
        """Of a process."""
        return DeviceKey(self.keys, self.tpm)

    def start(self, spec: DeviceSpec) -> DeviceKey:
        """Up to where pages are written."""
        key = self.key()
        key.begin(self.paths, spec)
        contents.begin(self.paths, spec)
        key.keep(self.paths, spec)
        return key

    def stop(self, key: DeviceKey, spec: DeviceSpec) -> None:
        """With its contents kept."""
        key.keep(self.paths, spec)
        self.paths.tables.write_bytes(b"tables")
        key.forget()

    def kept(self) -> DeviceSpec:
        """A device that has been started and stopped."""
        spec = self.spec()
        self.stop(self.start(spec), spec)
        return spec
