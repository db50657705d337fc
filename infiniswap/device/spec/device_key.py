# SPDX-License-Identifier: Apache-2.0
"""The key that seals a device's pages: its way from start to end.

A device without contents to keep has a key of its own for each start, which is gone with it. A
device that keeps its contents has one key until it is removed: `NAME.key`, beside its tables, is
that key sealed with the host's (infiniswap.device.spec.host_key). It is written before the first
page, and looked after at a stop that keeps the contents, so it is there whenever tables are.

A stop writes what the start has made, or what was read when the standby was made, so it does not
wait for a TPM. `NAME.key` therefore says with which of the TPM's host keys it was made: only where
somebody has exchanged that one, or removed `NAME.key`, a stop has to seal the device's key anew.

Only descriptors pass through here. The one of the key goes to the holder, and from there to each
standby (infiniswap.device.succession).
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from infiniswap.device.spec import contents, host_key
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.engine.seal import SEALED_KEY_BYTES, SealKeys
from infiniswap.errors import BackupError, EngineError, from_oserror
from infiniswap.system.files import overwrite, replace_file
from infiniswap.system.process import Degraded
from infiniswap.system.tpm import Tpm

log = logging.getLogger(__name__)

_SAVED_BYTES_MAX = 4096


class DeviceKey:
    """The key of one device, in one process. Every method but `degraded` and `close` blocks.

    Args:
        keys: of the C library; None: those of the extension, loaded when they are needed.
        tpm: of the host.

    Attributes:
        fd: of the key; -1: there is none, because pages are not sealed, or not yet.
        library: that seals pages; empty: none does.
    """

    def __init__(self, keys: SealKeys | None = None, tpm: Tpm | None = None) -> None:
        self.fd = -1
        self.library = ""
        self._made_keys = keys
        self._tpm = tpm or Tpm()
        self._saved = b""  # what `NAME.key` holds
        self._is_used_up = False

    @property
    def _keys(self) -> SealKeys:
        if self._made_keys is None:
            from infiniswap.engine.native_seal import NativeSealKeys

            self._made_keys = NativeSealKeys()
        return self._made_keys

    def begin(self, paths: DevicePaths, spec: DeviceSpec) -> None:
        """For a start, before anything is attached: a new key, or that of the kept contents.

        Raises:
            UnavailableError: nothing on this host can seal pages, or its TPM no host key.
            BackupError: the kept contents are sealed with a key that cannot be had, or the TPM does
                not open the host's key.
            ConfigError: the host's key is open to others, or damaged.
            NotPermittedError, SystemCallError: the host's key cannot be written.
        """
        if not spec.config.device.seal:
            return
        self.library = self._keys.library()
        if contents.are_kept(paths, spec):
            self.fd = self._load(paths, spec)
            return
        self.fd = self._keys.make()
        if contents.keeps_contents(spec):  # an error now is no reason for a stop to fail later
            host_key.make(Path(spec.host_key_file), self._tpm)
            self._seal(spec)

    def inherit(self, fd: int, paths: DevicePaths, spec: DeviceSpec) -> None:
        """For a standby.

        Args:
            fd: the predecessor's, which stays the caller's; -1: it has none.
            paths: of the device.
            spec: of the device.

        Raises:
            UnavailableError: nothing on this host can seal pages.
            EngineError: the predecessor seals, and has left no key.
        """
        if not spec.config.device.seal:
            return
        if fd < 0:
            raise EngineError("the predecessor has left no key for its pages", code=errno.ENOKEY)
        self.library = self._keys.library()
        self.fd = os.dup(fd)
        if contents.keeps_contents(spec):
            try:
                self._saved = _read(paths.key)
            except OSError as error:
                log.warning("%s: cannot read it: %s", paths.key, error.strerror)

    def _seal(self, spec: DeviceSpec) -> None:
        with host_key.opened(Path(spec.host_key_file), self._tpm, spec.name) as (key, mark):
            self._saved = self._keys.save(self.fd, key) + mark

    def _load(self, paths: DevicePaths, spec: DeviceSpec) -> int:
        again = (
            "Restore that file. Or begin with zeros: infiniswap device start "
            f"{spec.name} --discard-contents."
        )
        what = f"the contents of device {spec.name} are sealed, and its key cannot be had"
        try:
            sealed = _read(paths.key)[:SEALED_KEY_BYTES]
        except OSError as error:
            raise BackupError(
                f"{what}: {error.strerror}", where=str(paths.key), mend=again
            ) from error
        path = Path(spec.host_key_file)
        host_file = host_key.place(path)
        if host_file is None:
            raise BackupError(f"{what}: the host's key is gone", where=str(path), mend=again)
        try:
            with host_key.opened(path, self._tpm, spec.name) as (key, mark):
                fd = self._keys.load(sealed, key)
        except EngineError as error:
            if error.code != errno.EKEYREJECTED:
                raise
            raise BackupError(
                f"{what}: it was altered, or sealed with another key than {host_file}",
                where=str(paths.key),
                mend=again.replace("that file", "both files"),
            ) from error
        self._saved = sealed + mark
        return fd

    def keep(self, paths: DevicePaths, spec: DeviceSpec) -> None:
        """Makes sure that a device which keeps its contents has its key, sealed with the host's,
        beside its tables. To be called after contents.begin, as the key of discarded contents
        goes, and before contents.save.

        Raises:
            ConfigError: the host's key is open to others, or damaged.
            BackupError: it has to be sealed anew, and the TPM does not open the host's key.
            NotPermittedError, SystemCallError: it cannot be written.
        """
        if not contents.keeps_contents(spec):
            return
        path = Path(spec.host_key_file)
        if self.fd >= 0:
            mark = host_key.mark(path)
            if not mark or mark != self._saved[SEALED_KEY_BYTES:]:
                host_key.make(path, None)  # in place of one that was lost
                self._seal(spec)
        try:
            if self.fd >= 0:
                # It may be another key. No contents are kept while this one is not there.
                replace_file(paths.key, self._saved, overwrites=True)
            else:  # of discarded contents
                overwrite(paths.key)
                paths.key.unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror(
                "cannot keep the device's key", error, where=str(paths.key)
            ) from error

    def tended(self, *, is_used_up: bool) -> None:
        """Notes whether the engine lacks room for a further key (Engine.seal_tend)."""
        self._is_used_up = is_used_up

    def degraded(self, spec: DeviceSpec) -> list[str]:
        """What an administrator should know."""
        if not spec.config.device.seal:
            return [str(_not_sealed(spec))]
        return [str(_used_up(spec))] if self._is_used_up else []

    def forget(self) -> None:
        """At the device's end, when nothing uses it: overwrites it, for holder and standby as well.
        Idempotent.

        Raises:
            EngineError: it could not be overwritten; it is closed all the same.
        """
        if self.fd < 0:
            return
        try:
            self._keys.forget(self.fd)
        finally:
            self.close()

    def close(self) -> None:
        """Leaves it to others. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_SAVED_BYTES_MAX)


def _not_sealed(spec: DeviceSpec) -> Degraded:
    what = "pages are not sealed: donors, the network and the backup have them in plain text"
    if "device.seal" in spec.flags:  # of its own: configuration.load cannot have set it
        return Degraded(
            "seal",
            f"{what}. The device's contents were begun so",
            f"To seal them: copy them elsewhere, then infiniswap device remove {spec.name}, and "
            "start it again.",
        )
    return Degraded(
        "seal",
        f"{what} (device.seal is false)",
        "Write seal = true under [device], then stop the device and start it again.",
    )


def _used_up(spec: DeviceSpec) -> Degraded:
    return Degraded(
        "seal-keys",
        "pages of every key are in use, so further pages are sealed with the present one, which "
        "has sealed 2^32 already",
        f"infiniswap device stop {spec.name}, then start it again: a start makes room.",
    )
