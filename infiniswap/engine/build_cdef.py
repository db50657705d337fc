# SPDX-License-Identifier: Apache-2.0
"""Writes the C source of the Python binding. Run by CMake, not by users.

The declarations are taken from isw.h itself, between its two "cdef" markers, so that the binding
cannot drift from the header.

    python build_cdef.py csrc/include/isw.h OUTPUT.c
"""

from __future__ import annotations

import sys
from pathlib import Path

MODULE = "infiniswap.engine._isw"
_BEGIN = "/* cdef begin */"
_END = "/* cdef end */"


def extract(header: str) -> str:
    """The text between the markers.

    Raises:
        ValueError: a marker is missing, doubled or out of order.
    """
    if header.count(_BEGIN) != 1 or header.count(_END) != 1:
        raise ValueError(f"the header needs exactly one {_BEGIN!r} and one {_END!r}")
    text = header.partition(_BEGIN)[2].partition(_END)[0]
    if not text:
        raise ValueError(f"{_END!r} stands before {_BEGIN!r}")
    return text


def main(header_path: str, output_path: str) -> None:
    """Writes the binding's source to `output_path`."""
    import cffi  # only here: `extract` is also used where cffi is not installed

    ffi = cffi.FFI()
    ffi.cdef(extract(Path(header_path).read_text(encoding="utf-8")))
    ffi.set_source(MODULE, '#include "isw.h"')
    ffi.emit_c_code(output_path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} isw.h OUTPUT.c")
    main(sys.argv[1], sys.argv[2])
