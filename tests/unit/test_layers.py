# SPDX-License-Identifier: Apache-2.0
"""tools/check_layers.py: holds on this tree, and finds what it is for."""

from __future__ import annotations

from pathlib import Path

import check_layers as layers
import pytest


def test_this_tree_keeps_the_rules(project_root: Path) -> None:
    assert layers.check_tree(project_root) == []


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ("units.py", "import infiniswap.config"),
        ("policy/placement.py", "from infiniswap import engine"),
        ("policy/placement.py", "from infiniswap.control.messages import Hello"),
        ("policy/placement.py", "import time"),
        ("policy/placement.py", "import random"),
        ("policy/placement.py", "from random import choice"),
        ("control/messages.py", "from asyncio import Queue"),
        ("donor/daemon.py", "from infiniswap.device import maps"),
        ("donor/daemon.py", "from ..cli import main"),
        ("device/process/service.py", "def f():\n    import infiniswap.cli.main"),
        ("engine/native.py", "from infiniswap.system import cgroup"),
        ("cli/main.py", "from infiniswap.testing import fakes"),
        ("device/process/service.py", "from infiniswap.demo import job"),
        ("device/donors/link.py", "from infiniswap.device.slabs.mapper import SlabMapper"),
        ("device/spec/spec.py", "from infiniswap.device import process"),
        ("device/api.py", "from infiniswap.device.spec.spec import DeviceSpec"),
        ("donor/home.py", "import subprocess"),
        ("donor/home.py", "def f():\n    from subprocess import Popen as start"),
        ("donor/home.py", "import os as o\no.posix_spawn('/bin/sh', ['sh'], {})"),
        ("donor/home.py", "from os import execvpe"),
        ("cli/status.py", "import os\nfind = os.popen"),
        ("cli/status.py", "import os\nos.fork()"),
        ("discovery/watcher.py", "import asyncio\nasyncio.create_subprocess_exec('sh')"),
        ("device/off_loop.py", "from concurrent.futures import ProcessPoolExecutor"),
    ],
)
def test_a_wrong_import_is_found(relative: str, text: str) -> None:
    assert list(layers.check_python_text(relative, text))


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ("policy/placement.py", "from random import Random\nfrom infiniswap.units import GIB"),
        ("policy/placement.py", "from infiniswap.policy.ewma import Ewma"),
        ("device/process/service.py", "import time\nfrom infiniswap.engine.protocol import Engine"),
        ("cli/demo.py", "from infiniswap import __version__\nfrom infiniswap.donor import daemon"),
        ("testing/fakes.py", "from infiniswap.engine.protocol import Engine"),
        ("device/slabs/mapper.py", "from infiniswap.device.donors.link import DonorLink"),
        ("device/donors/link.py", "from infiniswap.device import off_loop"),
        ("device/__main__.py", "from infiniswap.device.process import life"),
        ("system/programs.py", "import subprocess"),
        ("device/jobs/job.py", "import subprocess\nsubprocess.Popen(['job'])"),
        ("donor/home.py", "from infiniswap.system import programs\nprograms.start(['ip'])"),
    ],
)
def test_a_right_import_is_not(relative: str, text: str) -> None:
    assert list(layers.check_python_text(relative, text)) == []


@pytest.mark.parametrize(
    ("relative", "include"),
    [
        ("util/io.c", "wire/nbd.h"),
        ("transport/tcp.c", "store/store.h"),
        ("engine/ops/read.c", "frontend/frontend.h"),
        ("engine/state/page.c", "engine/ops/ops.h"),
        ("engine/backup/queue.c", "engine/remote/remote.h"),
        ("engine/engine.c", "sim/isw_sim.h"),
        ("frontend/fuse.c", "transport/transport.h"),
        ("frontend/fuse.c", "engine/ops/ops.h"),
    ],
)
def test_a_wrong_include_is_found(relative: str, include: str) -> None:
    assert list(layers.check_c_text(relative, f'#include "{include}"\n'))


@pytest.mark.parametrize(
    ("relative", "include"),
    [
        ("frontend/fuse.c", "engine/request.h"),
        ("engine/ops/read.c", "engine/remote/remote.h"),
        ("engine/state/op.h", "transport/transport.h"),
        ("store/store.c", "wire/nbd_server.h"),
        ("util/io.c", "isw.h"),
    ],
)
def test_a_right_include_is_not(relative: str, include: str) -> None:
    assert list(layers.check_c_text(relative, f'#include "{include}"\n')) == []


def test_c_files_that_call_each_other_in_a_circle_are_found() -> None:
    def function(name: str, calls: str) -> str:
        return f"/* iswi_{name}() */\nint iswi_{name}(void)\n{{\n\treturn {calls};\n}}\n"

    files = {
        "engine/a.c": function("a", "iswi_b()"),
        "engine/b.c": function("b", "iswi_c()"),
        "engine/c.c": function("c", "0"),
        "util/d.c": function("d", "iswi_a()"),
    }
    assert list(layers.check_c_circles(files)) == []
    files["engine/c.c"] = function("c", "iswi_a()")
    assert [path for path, _ in layers.check_c_circles(files)] == [
        *("engine/a.c", "engine/b.c", "engine/c.c")
    ]


@pytest.mark.parametrize(
    "call", ["execvp(name, argv)", "posix_spawnp(&pid, name)", "system (text)", "fork()"]
)
def test_only_the_holder_starts_programs_in_c(call: str) -> None:
    assert list(layers.check_c_text("util/io.c", f"\t{call};\n"))
    assert list(layers.check_c_text("holder/child.c", f"\t{call};\n")) == []


def test_a_long_function_and_a_long_class_are_found_and_a_long_file_is_not() -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    pass\n" * (lines - 1)

    def a_class(lines: int) -> str:
        return "class C:\n" + "    a = 1\n" * (lines - 1)

    def faults(text: str) -> int:
        return len(list(layers.check_python_text("donor/home.py", text)))

    assert faults(function(70)) == 0
    assert faults(function(71)) == 1
    assert faults(a_class(300)) == 0
    assert faults(a_class(301)) == 1
    assert faults(function(50) * 100) == 0
