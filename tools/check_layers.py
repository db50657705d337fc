#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that imports and includes point one way, and a few other rules of the house.

Python: rights → errors, directories → units, fields, keys, own_code, code_versions → secret, peers
→ config → policy, control, engine → system → discovery → watch → ui → donor, device → demo,
invitation, simulation, planning → cli; each may import what stands before it, and itself.
`policy/`, `simulation/` and the message code are pure: no clock, no I/O, no randomness of their
own. `testing/` is shipped for tests and imported by nothing else. Programs are started in one place
(SPAWNERS), which gives them nothing that another user may have prepared.

C: util → wire, verbs, seal → transport, store → engine → frontend → api, and inside the engine
state → backup, remote → ops; of the engine a front end sees only engine/request.h, and never a
transport's header. The agent (far) stands on libc alone, and of it the front end includes
far/ring.h. The holder stands on util alone, the simulator (sim) on the engine, and nothing
on that. In the engine no two files call each other, however long the way round: what must be told
to whom came before is a pointer that is set by whom it is told to.

Run it from anywhere; prints each fault as `file:line: text`, exits 1 when there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PYTHON_RANKS = {
    "rights": -1,
    "errors": 0,
    "directories": 0,
    "units": 1,
    "ticks": 1,
    "fields": 1,
    "own_code": 1,
    "code_versions": 1,
    "rdma_address": 2,
    "json_text": 1,
    "keys": 1,
    "secret": 2,
    "toml_lines": 2,
    "events": 0,
    "logs": 1,
    "config_values": 2,
    "peers": 2,
    "config": 3,
    "config_text": 4,
    "config_changes": 4,
    "policy": 4,
    "control": 4,
    "engine": 4,
    "system": 5,
    "discovery": 6,
    "watch": 7,
    "ui": 8,
    "donor": 9,
    "device": 9,
    "demo": 10,
    "invitation": 10,
    "simulation": 10,
    "planning": 10,
    "cli": 11,
    "testing": 11,
    "__main__": 12,
}
# The rooms of infiniswap.device, each of which imports only those before it; __main__ puts all
# together.
DEVICE_ROOMS = (
    *("spec", "donors", "slabs", "frontends", "succession", "process"),
    *("control", "cleanup", "jobs"),
)
PURE_PARTS = (
    *("policy/", "simulation/", "fields", "rdma_address", "keys"),
    *("control/messages", "control/text", "control/rate"),
    *("invitation/token", "invitation/once", "invitation/messages"),
)
# Beside the one place: the user's own program, and the leader of its terminal, which runs no other.
SPAWNERS = ("system/programs.py", "device/jobs/job.py", "device/jobs/terminal.py")
SPAWNING_MODULES = {"subprocess", "multiprocessing", "pty", "_posixsubprocess"}
_SPAWNING_NAME = re.compile(
    r"posix_spawnp?|spawn[lv]p?e?|exec[lv]p?e?|v?fork(pty)?|system|popen|create_subprocess_\w+|"
    r"subprocess_(exec|shell)|ProcessPoolExecutor"
)
_C_SPAWNER = "holder/child.c"
_C_SPAWNING = re.compile(r"\b(posix_spawnp?|exec[lv]p?e?|execvpe|v?fork|system|popen|clone3?)\s*\(")

IMPURE_MODULES = {"asyncio", "socket", "os", "time", "random", "threading", "subprocess"}

C_RANKS = {"util": 0, "wire": 1, "transport": 2, "store": 2, "engine": 7, "frontend": 8, "api": 9}
C_RANKS |= {"engine/request.h": 3, "engine/state": 4, "engine/backup": 5, "engine/remote": 5}
C_RANKS |= {"engine/ops": 6}
C_RANKS |= {"verbs": 1, "seal": 1}
C_RANKS |= {"far": 0}  # the agent, on nothing; its ring is the front end's, too
C_RANKS |= {"holder": 1}  # a program of its own, on util alone
C_RANKS |= {"sim": 10}  # of the tests: nothing of the product includes it
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_C_NAME = re.compile(r"(?<!struct )\biswi?_\w+")
_C_DEFINES = re.compile(
    r"^(?!static\b)\w[\w *]*?\b(iswi?_\w+)(?:\([^;{}]*\)\s*\{|\s*=\s*\{)", re.MULTILINE
)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

FUNCTION_LINES_MAX = 70
CLASS_LINES_MAX = 300


def check_python_text(relative: str, text: str) -> Iterator[tuple[int, str]]:
    """Faults of one module; `relative` is its path below infiniswap/."""
    part = relative.partition("/")[0].removesuffix(".py")
    tree = ast.parse(text)
    yield from _too_long(tree, relative)
    if relative not in SPAWNERS:
        yield from _spawns(tree, relative)
    for line, module in _python_imports(tree, relative):
        top, _, rest = module.partition(".")
        if top != "infiniswap":
            if top in IMPURE_MODULES and relative.startswith(PURE_PARTS):
                yield line, f"{module} in a pure module: pass the clock or randomness in"
            continue
        if top_room := _wrong_room(relative, rest):
            yield line, f"{top_room}: rooms import one way"
        target = rest.partition(".")[0]
        if target not in PYTHON_RANKS or part not in PYTHON_RANKS or target == part:
            continue
        if PYTHON_RANKS[target] >= PYTHON_RANKS[part] or target == "testing":
            yield line, f"{part} must not import {target}: imports point one way"


def _spawns(tree: ast.AST, relative: str) -> Iterator[tuple[int, str]]:
    """What could start a program without infiniswap.system.programs."""
    found = list(_python_imports(tree, relative))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
    for line, name in found:
        if name.partition(".")[0] in SPAWNING_MODULES or _SPAWNING_NAME.fullmatch(name):
            yield line, f"{name}: programs are started by infiniswap.system.programs"


def _wrong_room(relative: str, target: str) -> str:
    """What is wrong with a module of infiniswap.device that imports `target`, or nothing."""
    here, there = relative.split("/")[:2], target.split(".")[:2]
    if here[0] != "device" or there[0] != "device" or len(there) < 2:
        return ""
    if there[1] not in DEVICE_ROOMS or here[1] == "__main__.py":
        return ""
    if here[1] not in DEVICE_ROOMS:
        return f"device/{here[1]} must not import the room {there[1]}"
    if DEVICE_ROOMS.index(there[1]) > DEVICE_ROOMS.index(here[1]):
        return f"device/{here[1]} must not import device/{there[1]}"
    return ""


def _too_long(tree: ast.AST, relative: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            lines_max = CLASS_LINES_MAX
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines_max = FUNCTION_LINES_MAX
        else:
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > lines_max:
            yield node.lineno, f"{node.name}: {lines} lines: split it (at most {lines_max})"


def _python_imports(tree: ast.AST, relative: str) -> Iterator[tuple[int, str]]:
    package = ["infiniswap", *relative.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], base]).rstrip(".")
            if base == "random" and [alias.name for alias in node.names] == ["Random"]:
                continue  # the type of what is passed in, not the global source
            if base in ("infiniswap", "infiniswap.device"):
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            else:
                yield node.lineno, base


def check_c_text(relative: str, text: str) -> Iterator[tuple[int, str]]:
    """Faults of one C file; `relative` is its path below csrc/."""
    part = _c_room(relative)
    for match in _INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start(1)) + 1
        target = _c_room(match[1])
        if target not in C_RANKS or part not in C_RANKS or target == part:
            continue
        if C_RANKS[target] >= C_RANKS[part]:
            yield line, f"{part} must not include {match[1]}: includes point one way"
        elif part == "frontend" and target == "transport":
            yield line, f"a front end must not include {match[1]}: it knows no transport"
        elif part == "frontend" and target.startswith("engine") and target != "engine/request.h":
            yield line, f"a front end sees only engine/request.h of the engine, not {match[1]}"
    if relative != _C_SPAWNER:
        for match in _C_SPAWNING.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"{match[1]}: programs are started by {_C_SPAWNER}"


def _c_room(relative: str) -> str:
    """The room of a path below csrc/: of two that fit the inner one."""
    return max(
        (room for room in C_RANKS if f"{relative}/".startswith(f"{room}/")),
        key=len,
        default=relative.partition("/")[0],
    )


def check_c_circles(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The files that call each other in a circle; `texts` by path below csrc/."""
    code = {path: _C_COMMENT.sub("", text) for path, text in texts.items() if path.endswith(".c")}
    homes = {name: path for path, text in code.items() for name in _C_DEFINES.findall(text)}
    calls = {
        path: {homes[name] for name in _C_NAME.findall(text) if name in homes} - {path}
        for path, text in code.items()
    }
    while True:  # whoever calls nobody that is left, or is called by none of them, is in none
        called = set().union(*calls.values())
        out = [
            path for path, others in calls.items() if path not in called or not others & {*calls}
        ]
        if not out:
            break
        for path in out:
            del calls[path]
    for path, others in sorted(calls.items()):
        yield path, f"in a circle of calls with {', '.join(sorted(others & {*calls}))}"


def _check_common(text: str) -> Iterator[tuple[int, str]]:
    if "SPDX-License-Identifier: Apache-2.0" not in text[:200]:
        yield 1, "the SPDX line is missing"


def check_tree(root: Path) -> list[str]:
    """All faults of a checkout, as `file:line: text`."""
    faults: list[str] = []

    def add(path: Path, found: Iterator[tuple[int, str]]) -> None:
        faults.extend(f"{path.relative_to(root)}:{line}: {text}" for line, text in found)

    for path in sorted((root / "infiniswap").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        add(path, check_python_text(path.relative_to(root / "infiniswap").as_posix(), text))
        add(path, _check_common(text))
    c_texts: dict[str, str] = {}
    for path in sorted((root / "csrc").rglob("*.[ch]")):
        relative, text = path.relative_to(root / "csrc").as_posix(), path.read_text("utf-8")
        c_texts[relative] = text
        add(path, check_c_text(relative, text))
        add(path, _check_common(text))
    for relative, text in check_c_circles(c_texts):
        add(root / "csrc" / relative, iter([(1, text)]))
    return faults


def main() -> int:
    """Prints the faults of the checkout this script lies in."""
    faults = check_tree(Path(__file__).resolve().parent.parent)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
