# SPDX-License-Identifier: Apache-2.0
"""TPMs of a test's own: a program in the place of `systemd-creds`, and a software TPM behind it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from infiniswap.system.tpm import Tpm
from support.devices.cluster import WAIT_S, until

_PROGRAM = """#!{python} -IS
import hashlib, json, pathlib, sys, time
here = pathlib.Path({here!r})
verb, options, given = sys.argv[1], sys.argv[2:], sys.stdin.buffer.read()
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([verb, *options]) + "\\n")
ill = (here / "ill").read_text()
if ill == verb + " hangs":
    time.sleep(3600)
if ill.startswith(verb + " says "):
    sys.exit("first a line of a library\\n" + ill.removeprefix(verb + " says "))
mask = hashlib.sha256((here / "machine").read_bytes()).digest()
if ill == verb + " gives garbage":
    sys.stdout.buffer.write(b"x" * 100)
elif ill == verb + " gives other bytes":
    sys.stdout.buffer.write(b"x" * 32)
elif verb == "encrypt":
    assert len(given) == 32 and options[-2:] == ["-", "-"]
    pcrs = next(word for word in options if word.startswith("--tpm2-pcrs="))
    sealed = bytes(a ^ b for a, b in zip(given, mask))
    print(pcrs, sealed.hex(), hashlib.sha256(given + mask).hexdigest())
else:
    pcrs, sealed, tag = given.decode().split()
    if ill == "252" and pcrs == "--tpm2-pcrs=":
        sys.exit("TPM2 PCR bank invalid or not supported")
    secret = bytes(a ^ b for a, b in zip(bytes.fromhex(sealed), mask))
    if hashlib.sha256(secret + mask).hexdigest() != tag:
        sys.exit("Failed to unseal HMAC key in TPM: State not recoverable")
    sys.stdout.buffer.write(secret)
"""


class StandIn:
    """A host with a TPM whose `systemd-creds` does as the test says."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        program = directory / "systemd-creds"
        program.write_text(_PROGRAM.format(python=sys.executable, here=str(directory)))
        program.chmod(0o755)
        self.is_on_machine("one")
        self.falls_ill("")
        node = directory / "tpmrm0"
        node.touch()
        self.tpm = Tpm(node=node, program=str(program), run_by=(), s_max=20.0)
        self.hasty = Tpm(node=node, program=str(program), run_by=(), s_max=0.5)

    def falls_ill(self, how: str) -> None:
        """`VERB hangs`, `VERB gives garbage`, `VERB gives other bytes`, `VERB says SENTENCE` and
        fails, `252`: as that release; empty: it is well again."""
        (self._directory / "ill").write_text(how)

    def is_on_machine(self, name: str) -> None:
        """What another machine has sealed does not open."""
        (self._directory / "machine").write_text(name)

    @property
    def calls(self) -> list[str]:
        """Every command, as JSON."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / "calls").read_text().splitlines()
        return []


class SoftwareTpm:
    """swtpm, which the real `systemd-creds` talks to.

    Sessions that systemd 252 leaves open are closed by a host's kernel, and here by a boot alone:
    the fourth command in a row fails.

    Args:
        directory: for its state and sockets.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        node = self._socket = directory / "tpm"
        node.touch()  # until it serves
        self._state = directory / "state"
        self.tpm = Tpm(node=directory, device=f"swtpm:path={node}", run_by=(), s_max=20.0)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, state: str = "one") -> None:
        """As a machine that boots: one with the TPM of that name."""
        directory = self._state / state
        directory.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        program = shutil.which("swtpm", path="/usr/bin:/usr/local/bin")
        assert program is not None
        self._process = subprocess.Popen(
            [
                *(program, "socket", "--tpm2", "--flags", "not-need-init,startup-clear"),
                *("--tpmstate", f"dir={directory}"),
                *("--server", f"type=unixio,path={self._socket}"),
                *("--ctrl", f"type=unixio,path={self._socket}.ctrl"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._socket.exists, "a TPM that serves")

    def stop(self) -> None:
        """The machine is off. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(WAIT_S)

    def boot(self, state: str = "one") -> None:
        """Off and on again."""
        self.stop()
        self.start(state)

    def hang(self) -> None:
        """It takes commands and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def extend(self, pcr: int) -> None:
        """As firmware, boot loader and kernel do with what they load: TPM2_PCR_Extend."""
        session = struct.pack(">IHBH", 0x40000009, 0, 0, 0)
        digest = struct.pack(">IH", 1, 0x000B) + os.urandom(32)
        body = struct.pack(">II", pcr, len(session)) + session + digest
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(WAIT_S)
            client.connect(str(self._socket))
            client.sendall(struct.pack(">HII", 0x8002, 10 + len(body), 0x182) + body)
            _tag, _size, code = struct.unpack(">HII", client.recv(1024)[:10])
        assert code == 0, hex(code)
