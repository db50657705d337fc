# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.executable, on programs that are only as much of a program as it reads."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.system.executable import _SANITIZERS, why_not_preloaded

GLIBC = "/lib64/ld-linux-x86-64.so.2"
MACHINE = Path("/proc/self/exe").read_bytes()[18:20]
ADDRESS = 0x400000


def elf(
    path: Path,
    *,
    loader: str = GLIBC,
    names: bytes = b"\0malloc\0",
    kind: int = 2,
    machine: bytes = MACHINE,
    mode: int = 0o755,
) -> Path:
    """A program: its header, what loads it, and the names that it takes from libraries."""
    parts = [loader.encode() + b"\0" if loader else b"", names]
    at = 64 + 3 * 56
    dynamic = struct.pack("<qQqQ", 5, ADDRESS + at + len(parts[0]), 10, len(names))
    parts.append(dynamic)
    places = [at, at + len(parts[0]), at + len(parts[0]) + len(names)]
    size = places[2] + len(dynamic)
    segments = [(1, 0, size, ADDRESS), (2, places[2], len(dynamic), 0)]
    if loader:
        segments.append((3, places[0], len(parts[0]), 0))
    head = b"\x7fELF" + bytes([kind, 1, 1]) + bytes(9) + struct.pack("<H", 2) + machine
    head += struct.pack("<IQQQIHHHHHH", 1, 0, 64, 0, 0, 64, 56, len(segments), 0, 0, 0)
    table = b"".join(
        struct.pack("<IIQQQQQQ", what, 4, offset, address, 0, length, length, 8)
        for what, offset, length, address in segments
    )
    path.write_bytes((head + table).ljust(at, b"\0") + b"".join(parts))
    path.chmod(mode)
    return path


def why(path: Path, *words: str, uid: int = 0) -> str:
    return why_not_preloaded([str(path), *words], os.environ["PATH"], uid)


def test_usual_programs_and_scripts_of_theirs_can_have_a_library(tmp_path: Path) -> None:
    assert why(elf(tmp_path / "program")) == ""
    assert why(Path(sys.executable)) == ""
    assert why_not_preloaded(["sh", "-c", "x"], os.environ["PATH"], 0) == ""
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable} -u\nprint()\n")
    script.chmod(0o755)
    assert why(script) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loader": ""}, "it is statically linked"),
        ({"kind": 1}, "it is no 64-bit program"),
        ({"machine": b"\x99\x99"}, "it is for another processor"),
        ({"loader": "/lib/ld-musl-x86_64.so.1"}, "is not glibc (its loader is ld-musl-x86_64.so.1"),
        ({"names": b"\0libasan.so.8\0__asan_init\0"}, "it is built with AddressSanitizer"),
        ({"names": b"\0__tsan_init\0free\0"}, "it is built with ThreadSanitizer"),
    ],
)
def test_a_program_that_cannot_have_a_library_is_named_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    assert reason in why(elf(tmp_path / "program", **changes))  # type: ignore[arg-type]


def test_a_program_with_rights_of_its_own_is_refused_by_the_loader(tmp_path: Path) -> None:
    own = os.getuid()
    program = elf(tmp_path / "program", mode=0o4755)
    assert "(setuid, setgid or capabilities)" in why(program, uid=own + 1)
    assert why(program, uid=own) == ""
    program.chmod(0o2755)
    assert "(setuid, setgid or capabilities)" in why(program, uid=own + 1)


@pytest.mark.parametrize("line", ["#!{0}", "#!/usr/bin/env {1}", "#!/usr/bin/env -S {1} -x"])
def test_the_interpreter_of_a_script_is_judged(tmp_path: Path, line: str) -> None:
    program = elf(tmp_path / "interpreter", loader="")
    script = tmp_path / "script"
    script.write_text(line.format(program, program.name) + "\nx\n")
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert why_not_preloaded([str(script)], path, 0) == "it is statically linked"


def test_a_script_that_names_itself_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{script}\n")
    script.chmod(0o755)
    assert why(script) == ""


def test_a_pipe_in_place_of_a_program_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o755)
    assert why(tmp_path / "pipe") == ""


@given(st.binary(max_size=400))
def test_a_damaged_program_is_left_to_the_kernel_to_refuse(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(b"\x7fELF\x02\x01" + data)
    path.chmod(0o755)
    assert isinstance(why(path), str)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["-static"], "statically linked"),
        (["-fsanitize=address"], "AddressSanitizer"),
        (["-fsanitize=leak"], "LeakSanitizer"),
        ([], ""),
    ],
)
def test_what_a_compiler_makes_is_told_apart(tmp_path: Path, flags: list[str], reason: str) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source = tmp_path / "x.c"
    source.write_text("int main(void) { return 0; }\n")
    argv = ["gcc", *flags, "-o", str(tmp_path / "x"), str(source)]
    if subprocess.run(argv, capture_output=True).returncode != 0:
        pytest.skip(f"this gcc has nothing for {flags}")
    found = why(tmp_path / "x")
    assert (reason in found) if reason else found == ""


def test_the_agent_itself_stays_out_of_the_same_programs(project_root: Path) -> None:
    source = (project_root / "csrc/far/start.c").read_text()
    named = set(re.findall(r"extern void (__\w+san_init)\(void\)", source))
    assert named == {mark.strip(b"\0").decode() for mark in _SANITIZERS}
