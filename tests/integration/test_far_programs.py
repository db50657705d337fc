# SPDX-License-Identifier: Apache-2.0
"""Real programs with the agent, whose memory leaves and comes back all the time.

`test_far_job run` tells the agent by turns that its cgroup is full and that it is not: there is no
limit in force, and nothing swaps. The programs must write the same bytes as without it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.devices.far_memory import FAR_JOB

from infiniswap.system.userfault import far_refusal

WAIT_S = 400.0

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.skipif(far_refusal() is not None, reason=f"needs far memory: {far_refusal()}"),
    pytest.mark.timeout(2 * WAIT_S),
]

SQLITE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute("pragma cache_size = -200000")
db.execute("create table t (id integer primary key, a int, b text)")
rows = ((i * 7919 % 10007, f"row{i * 31 % 977}" * 3) for i in range(int(sys.argv[2])))
db.executemany("insert into t (a, b) values (?, ?)", rows)
db.execute("create index of_a on t (a)")
for row in db.execute("select b, count(*), sum(a) from t group by b order by b"):
    print(*row)
for row in db.execute("select x.a, count(*) from t x join t y on x.id = y.a group by 1 order by 1"):
    print(*row)
db.execute("delete from t where a % 3 = 0")
db.commit()
db.execute("vacuum")
print(db.execute("pragma integrity_check").fetchall())
"""

NODE = """
const crypto = require('crypto'), zlib = require('zlib'), parts = [];
for (let k = 0; k < 8; k++) {
  const part = Buffer.alloc(8 << 20);
  for (let i = 0; i < part.length; i += 16) part.writeUInt32LE((i ^ (k * 2654435761)) >>> 0, i);
  parts.push(part);
}
const all = Buffer.concat(parts), packed = zlib.gzipSync(all, { level: 1 });
if (!zlib.gunzipSync(packed).equals(all)) throw new Error('differs');
console.log(crypto.createHash('sha256').update(all).update(packed).digest('hex'));
"""

REDIS = """
set -eu
cd "$1"
redis-server --port 0 --unixsocket socket --save "" --enable-debug-command yes >log &
for i in $(seq 400); do redis-cli -s socket ping >/dev/null 2>&1 && break; sleep 0.05; done
redis-cli -s socket --pipe <commands | tail -n 1
redis-cli -s socket debug digest
redis-cli -s socket save
redis-cli -s socket shutdown nosave
wait
"""

PASSED = """
cd "$1"
shift
"$@" >said 2>&1
code=$?
tail -n 1 said | sed 's/ in [0-9].*//'
[ $code -eq 0 ] || tail -n 30 said >&2
exit $code
"""

FUNCTION = """
static long f{i}(long *a, long n) {{
  long s = {i};
  for (long k = 0; k < n; k++) {{
    switch (a[k] & 7) {{
    case 0: s += a[k] * {i}; break;
    case 1: s ^= a[k] << (k & 3); break;
    case 2: s -= n / (k + 1); break;
    default: a[k] = s + a[(k + {i}) % n];
    }}
  }}
  return s;
}}
"""

_FAR = re.compile(r"^far: (\d+) MiB out, \d+ MiB in$", re.MULTILINE)


def check_same(command: list[str], far_mib: int = 1) -> None:
    """Runs it without the agent and with it, where so much at least must have left."""
    plain = subprocess.run(command, capture_output=True, check=False, timeout=WAIT_S)
    assert plain.returncode == 0, plain.stderr.decode()
    far = subprocess.run(
        [str(FAR_JOB), "run", *command], capture_output=True, check=False, timeout=WAIT_S
    )
    said = far.stderr.decode()
    assert far.returncode == 0, said
    assert far.stdout == plain.stdout
    moved = _FAR.search(said)
    assert moved is not None, said
    assert int(moved[1]) >= far_mib, said


def python() -> str:
    """One with the C library's allocator."""
    found = shutil.which("python3", path="/usr/bin:/bin")
    if found is None:
        pytest.skip("needs the system's python3")
    return found


def test_sqlite_in_memory() -> None:
    check_same([python(), "-c", SQLITE, ":memory:", "250000"])


@pytest.mark.requires_tool("sort")
def test_sort_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    with lines.open("w") as file:
        for number in range(200_000):
            print(number * 2654435761 % 4294967291, number, file=file)
    check_same(
        ["env", "LC_ALL=C", "sort", "-S", "40M", "-T", str(tmp_path), "--parallel=2", str(lines)]
    )


@pytest.mark.full
@pytest.mark.requires_tool("node")
def test_node_with_large_buffers() -> None:
    check_same(["node", "-e", NODE], far_mib=16)


@pytest.mark.full
@pytest.mark.requires_tool("xz")
def test_xz_unpacks_what_it_packed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(
        b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    )
    check_same(["sh", "-c", 'xz -3 -T1 -c "$1" | xz -d -c | sha256sum', "sh", str(data)])


@pytest.mark.full
@pytest.mark.requires_tool("redis-server", "redis-cli")
def test_redis_with_another_allocator(tmp_path: Path) -> None:
    """jemalloc gives the program what begins its mappings."""
    with (tmp_path / "commands").open("w") as file:
        for number in range(20_000):
            words = ("set", f"key{number}", f"{number:08d}" * 200)
            file.write(f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words))
    check_same(["sh", "-c", REDIS, "sh", str(tmp_path)], far_mib=16)


@pytest.mark.full
@pytest.mark.requires_tool("gcc")
def test_gcc_compiles_a_large_file(tmp_path: Path) -> None:
    """Its garbage collector maps and unmaps its own pages."""
    source = tmp_path / "large.c"
    calls = "".join(f"  s += f{i}(a, n);\n" for i in range(2000))
    source.write_text(
        "".join(FUNCTION.format(i=i) for i in range(2000))
        + f"long all(long *a, long n) {{\n  long s = 0;\n{calls}  return s;\n}}\n"
    )
    check_same(["gcc", "-O2", "-S", "-o", "-", str(source)], far_mib=16)


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "modules"),
    [
        ("numpy", ["numpy.lib.tests"]),
        ("pandas", ["pandas.tests.reshape.merge"]),
    ],
)
def test_own_tests_of(tmp_path: Path, library: str, modules: list[str]) -> None:
    """The library's own tests pass in the same number with and without the agent."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, as `make .venv/.stamp-bench-apps` installs it")
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
    options = ["-c", os.devnull, "--pyargs", *modules]
    alone = ["env", "-u", "PYTEST_ADDOPTS", *program, *options]
    check_same(["sh", "-c", PASSED, "sh", str(tmp_path), *alone])
