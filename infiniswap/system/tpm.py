# SPDX-License-Identifier: Apache-2.0
"""This host's TPM: it seals a few bytes so that no other machine can open them. By `systemd-creds`.

Nothing is bound to the state of firmware, secure boot or kernel (PCRs), because an update of these
must never cost contents. Release 252 of systemd seals without PCRs and cannot open the result, so
there it is PCR 23: zero at every boot, and of no use to firmware, boot loader and kernel.

Only root may open the TPM, and Debian gives the device file to the user tss, so root needs
CAP_DAC_OVERRIDE, which devices have not. Where systemd runs, it therefore runs the command.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infiniswap.errors import SystemCallError, UnavailableError
from infiniswap.system import programs, systemd

NODE: Final = "/dev/tpmrm0"
SEALED_BYTES_MAX: Final = 16 * 1024
_PROGRAM: Final = "systemd-creds"
_NAME: Final = "infiniswap-host-key"
_PCRS: Final = ("", "23")
_S_MAX: Final = 60.0
"""A TPM may take 20 s to make a key, and has several callers when a host boots."""
_UNSUPPORTED: Final = "Operation not supported"


def move_command(source: Path, target: Path) -> str:
    """Seals a file by hand, and removes it when it has opened."""
    how = f"--tpm2-device={NODE} --name={_NAME}"
    # This PCR, as the result opens with every release.
    return (
        f"{_PROGRAM} encrypt --with-key=tpm2 --tpm2-pcrs={_PCRS[-1]} {how} {source} {target} && "
        f"{_PROGRAM} decrypt {how} {target} - | cmp - {source} && shred -u {source}"
    )


def _by_systemd() -> tuple[str, ...]:
    if not systemd.has_bus() or programs.find("systemd-run") is None:
        return ()
    bound = f"--property=RuntimeMaxSec={1.5 * _S_MAX:g}"  # for one that we no longer wait for
    return ("systemd-run", "--quiet", "--pipe", "--wait", "--collect", bound, "--")


@dataclass(frozen=True, slots=True)
class Tpm:
    """Every method but `is_there` blocks, for `s_max` at most each time that it runs a command.

    Attributes:
        node: that is there where the host has one.
        device: as `systemd-creds` takes it. Always named: left to itself, the TPM's library looks
            for other ones, among them whatever listens on a port of this host.
        program: `systemd-creds`.
        run_by: what runs it.
        s_max: seconds.
    """

    node: Path = Path(NODE)
    device: str = NODE
    program: str = _PROGRAM
    run_by: tuple[str, ...] = field(default_factory=_by_systemd)
    s_max: float = _S_MAX

    def is_there(self) -> bool:
        """Whether this host has one, and what it takes to ask it."""
        return self.node.exists() and self._path() is not None

    def _path(self) -> str | None:
        return self.program if os.path.isabs(self.program) else programs.find(self.program)

    def seal(self, secret: bytearray) -> bytes:
        """Seals it, and sees that it opens.

        Raises:
            UnavailableError: this systemd cannot use this TPM, or its libraries are not installed.
            SystemCallError, NotPermittedError, DeadlineError: the TPM refuses, or takes too long.
        """
        refusal = SystemCallError("what it seals does not open")
        for pcrs in _PCRS:
            sealed = bytearray(SEALED_BYTES_MAX)
            options = ("--with-key=tpm2", f"--tpm2-pcrs={pcrs}")
            del sealed[self._run("encrypt", options, secret, sealed) :]
            try:
                opened = self.open(bytes(sealed), len(secret))
            except SystemCallError as error:
                refusal = error
                continue
            is_same = opened == secret
            opened[:] = bytes(len(opened))
            if is_same:
                return bytes(sealed)
        raise refusal

    def open(self, sealed: bytes, size: int) -> bytearray:
        """What was sealed, of `size` bytes. The caller overwrites it after use.

        Raises:
            As `seal`; SystemCallError also when it was sealed by another TPM, or altered.
        """
        secret = bytearray(size + 1)
        got = self._run("decrypt", (), sealed, secret)
        del secret[size:]
        if got != size:
            secret[:] = bytes(size)
            raise SystemCallError(f"what opens has not {size} bytes")
        return secret

    def _run(
        self, verb: str, options: tuple[str, ...], given: bytes | bytearray, into: bytearray
    ) -> int:
        argv = [*self.run_by, self._path() or self.program, verb, *options]
        argv += [f"--tpm2-device={self.device}", f"--name={_NAME}", "-", "-"]
        got, done = programs.convert(argv, given, into, timeout_s=self.s_max)
        if done.code == 0:
            return got
        said = done.stderr.strip().splitlines()
        reason = "; ".join(line.strip() for line in said[-2:]) or f"exit code {done.code}"
        error = (
            UnavailableError if verb == "encrypt" and _UNSUPPORTED in reason else SystemCallError
        )
        raise error(f"{self.program} {verb}: {reason}")
