# SPDX-License-Identifier: Apache-2.0
"""tools/kubernetes: manifests that the published schemas accept, with the rights they need only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from container_image.__main__ import USER_ID

from infiniswap import config as configuration
from infiniswap.cli.main import build_parser
from infiniswap.units import MIB

DIRECTORY = Path(__file__).resolve().parents[2] / "tools" / "kubernetes"
FILES = sorted(DIRECTORY.glob("*.yaml"))
VERSIONS = ("1.30", "1.33")
"""Of Kubernetes. The fields that are used are older than the first."""
EVICTION_BYTES = 100 * MIB
"""memory.available in the kubelet's evictionHard, unless it is configured."""
_SHELL_WORDS = re.compile(r"infiniswap (?:daemon|donor) [^;\n]*")


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def every() -> Iterator[Any]:
    for path in FILES:
        yield from documents(path)


def pods() -> Iterator[tuple[str, Any]]:
    for one in every():
        if one["kind"] == "DaemonSet":
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def containers() -> Iterator[tuple[str, Any]]:
    for name, pod in pods():
        for one in [*pod.get("initContainers", ()), *pod["containers"]]:
            yield f"{name}/{one['name']}", one


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_published_schemas_accept_them(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_key_is_found() -> None:
    (document,) = documents(DIRECTORY / "release.yaml")
    document["spec"]["template"]["spec"]["hostNetwrk"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetwrk"):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_only_what_mounts_on_the_node_is_privileged() -> None:
    for name, one in containers():
        rights = one["securityContext"]
        mounts = [mount.get("mountPropagation") for mount in one.get("volumeMounts", ())]
        assert rights.get("privileged", False) == ("Bidirectional" in mounts), name
        if not rights.get("privileged"):
            assert rights["runAsUser"] == USER_ID, name
            assert rights["runAsNonRoot"], name
            assert rights["readOnlyRootFilesystem"], name
            assert rights["allowPrivilegeEscalation"] is False, name
            assert rights["capabilities"] == {"drop": ["ALL"]}, name
    for _, pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostPID", "hostIPC"} & pod.keys()


def test_nothing_bounds_what_a_node_lends() -> None:
    for name, one in containers():
        assert "limits" not in one.get("resources", {}), name


def test_every_mount_has_its_volume() -> None:
    for name, pod in pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        used = {
            mount["name"]
            for one in [*pod.get("initContainers", ()), *pod["containers"]]
            for mount in one.get("volumeMounts", ())
        }
        assert used == volumes, name


def test_the_configuration_is_one_and_keeps_the_kubelet_away(tmp_path: Path) -> None:
    (text,) = [one["data"]["infiniswap.toml"] for one in every() if one["kind"] == "ConfigMap"]
    path = tmp_path / "infiniswap.toml"
    path.write_text(text)
    daemon = configuration.load(path).daemon
    assert daemon.headroom_bytes is not None
    assert daemon.headroom_bytes >= 10 * EVICTION_BYTES
    pod = dict(pods())["infiniswap-donor"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {"control": daemon.listen.port, "pages": daemon.data_port}


def test_every_command_is_one_of_ours() -> None:
    found = 0
    for _, one in containers():
        hooks = one.get("lifecycle", {}).values()
        for argv in [one.get("args", []), *(hook["exec"]["command"] for hook in hooks)]:
            lines = [" ".join(argv)] if argv[:1] == ["daemon"] else argv
            for line in lines:
                prefix = "infiniswap " if line.startswith("daemon ") else ""
                for command in _SHELL_WORDS.findall(prefix + line):
                    build_parser().parse_args(shlex.split(command)[1:])
                    found += 1
    assert found == 4
