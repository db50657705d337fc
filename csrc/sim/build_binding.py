# SPDX-License-Identifier: Apache-2.0
"""Writes the C source of the simulator's binding. Run by CMake, for an editable install only.

Its types and constants are those of the product's binding, which it includes.

    python csrc/sim/build_binding.py OUTPUT.c
"""

from __future__ import annotations

import sys
from pathlib import Path

_CSRC = Path(__file__).resolve().parent.parent


def main(output_path: str) -> None:
    """Writes the binding's source to `output_path`."""
    sys.path.insert(0, str(_CSRC.parent / "infiniswap" / "engine"))
    import build_cdef
    import cffi

    product, sim = cffi.FFI(), cffi.FFI()
    for ffi, module, header in (
        (product, build_cdef.MODULE, "include/isw.h"),
        (sim, "_isw_sim", "sim/isw_sim.h"),
    ):
        if ffi is sim:
            sim.include(product)
        ffi.cdef(build_cdef.extract((_CSRC / header).read_text(encoding="utf-8")))
        ffi.set_source(module, f'#include "{header}"')
    sim.emit_c_code(output_path)


if __name__ == "__main__":
    main(sys.argv[1])
