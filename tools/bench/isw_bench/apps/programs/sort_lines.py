# SPDX-License-Identifier: Apache-2.0
"""`python sort_lines.py make DIRECTORY LINES` or `sort_lines.py run DIRECTORY KIB`: GNU sort on
lines of 32 random hexadecimal digits, with a buffer of that size.

Prints a checksum of the sorted lines.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SEED = 5
DIGITS = 32
CHUNK = 1_000_000


def make(directory: Path, lines: int) -> None:
    """Writes the lines."""
    rng = np.random.default_rng(SEED)
    with (directory / "lines").open("wb") as file:
        for begin in range(0, lines, CHUNK):
            count = min(CHUNK, lines - begin)
            digits = rng.bytes(count * DIGITS // 2).hex().encode()
            text: np.ndarray = np.full((count, DIGITS + 1), ord("\n"), np.uint8)
            text[:, :DIGITS] = np.frombuffer(digits, np.uint8).reshape(count, DIGITS)
            file.write(text.tobytes())


def run(directory: Path, kibibytes: int) -> dict[str, str]:
    """Sorts; what does not fit into the buffer goes to files below TMPDIR."""
    argv = ["sort", f"--buffer-size={kibibytes}K", f"--temporary-directory={tempfile.gettempdir()}"]
    digest = hashlib.sha256()
    with subprocess.Popen([*argv, str(directory / "lines")], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        while block := child.stdout.read(1 << 20):
            digest.update(block)
    if child.returncode:
        sys.exit(f"sort ended with exit code {child.returncode}")
    return {"sha256": digest.hexdigest()}


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps({"check": run(Path(sys.argv[2]), int(sys.argv[3]))}))
