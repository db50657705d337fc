# SPDX-License-Identifier: Apache-2.0
"""The image as a donor in podman, with the commands and rights of tools/kubernetes/donor.yaml."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.devices.cluster import NEEDS_SWAP, Cluster, free_port, until
from support.jobs.runs import Runner, touch
from support.machine.ran import ran
from support.machine.wheels import copy_checkout, make_in

from infiniswap.system import mounts

pytestmark = [
    *NEEDS_SWAP,
    pytest.mark.full,
    pytest.mark.requires_tool("podman", "buildah", "runc", "debootstrap", "make", "cmake", "cc"),
    pytest.mark.timeout(3600),
]

_BUILD_S = 1800.0
_LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""podman would raise both, which takes CAP_SYS_RESOURCE."""
_MANIFESTS = Path(__file__).resolve().parents[2] / "tools" / "kubernetes"
SETTINGS = {
    "INFINISWAP_DAEMON_SLAB": "8M",
    "INFINISWAP_DAEMON_POOL": "256M",
    "INFINISWAP_DAEMON_HEADROOM": "64M",
    "INFINISWAP_DAEMON_DATA_PORT": "0",
}


def pod(name: str) -> Any:
    """The pod of a manifest's only DaemonSet."""
    for document in yaml.safe_load_all((_MANIFESTS / name).read_text()):
        if document["kind"] == "DaemonSet":
            return document["spec"]["template"]["spec"]
    raise AssertionError(name)


class Node:
    """What a kubelet does with the manifests, by podman.

    Args:
        image: its name in the engine.
        root: the node's directories lie here.
        secret: of the cluster.
    """

    def __init__(self, image: str, root: Path, secret: Path) -> None:
        self._image = image
        self._volumes: dict[str, str] = {"machine-id": "/etc/machine-id"}
        self.name = f"isw-test-{secrets.token_hex(4)}"
        for name in ("slabs", "state", "config", "secret"):
            (root / name).mkdir()
            self._volumes[name] = str(root / name)
        (root / "secret" / "secret").write_bytes(secret.read_bytes())
        (root / "secret" / "secret").chmod(0o400)
        (text,) = [
            one["data"]["infiniswap.toml"]
            for one in yaml.safe_load_all((_MANIFESTS / "donor.yaml").read_text())
            if one["kind"] == "ConfigMap"
        ]
        (root / "config" / "infiniswap.toml").write_text(text)
        self.slabs = root / "slabs"
        # As a node's /run is: a mount that others see. Private first, or it would share with the
        # one below it what is mounted in it.
        for flags in (("--bind", str(self.slabs)), ("--make-private",), ("--make-shared",)):
            assert ran("mount", *flags, str(self.slabs)).returncode == 0

    def argv(
        self, container: Mapping[str, Any], env: Mapping[str, str], *options: str
    ) -> list[str]:
        """podman's command line for a container of a manifest."""
        rights = container["securityContext"]
        argv = ["podman", "--runtime", "runc", "run", "--network", "host", *_LIMITS, *options]
        for name, value in env.items():
            argv += ["--env", f"{name}={value}"]
        for mount in container["volumeMounts"]:
            how = {"Bidirectional": ":rshared", "HostToContainer": ":rslave"}.get(
                mount.get("mountPropagation", ""), ":ro" if mount.get("readOnly") else ""
            )
            argv += ["--volume", f"{self._volumes[mount['name']]}:{mount['mountPath']}{how}"]
        if rights.get("privileged"):
            argv.append("--privileged")
        else:
            argv += ["--read-only", "--security-opt", "no-new-privileges"]
            argv += [f"--cap-drop={name}" for name in rights["capabilities"]["drop"]]
        if "runAsUser" in rights:
            argv += ["--user", f"{rights['runAsUser']}:{rights.get('runAsGroup', 0)}"]
        if "command" in container:
            argv += ["--entrypoint", json.dumps(container["command"])]
        return [*argv, self._image, *container["args"]]

    def close(self) -> None:
        """Nothing of it is left."""
        ran("podman", "rm", "--force", "--time", "0", self.name)
        for mount in reversed(mounts.mounts()):
            if Path(mount.mount_point).is_relative_to(self.slabs):
                ran("umount", mount.mount_point)


@pytest.fixture(scope="module")
def image(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tree = copy_checkout(project_root, tmp_path_factory.mktemp("image") / "tree")
    results = make_in(tree, "image", "DEB_ARGS=--release 12 --version 0.0.1")
    (archive,) = results.glob("*.oci.tar")
    done = ran("podman", "load", "--quiet", "--input", archive, wait_s=_BUILD_S)
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[-1]
    yield name
    assert ran("podman", "rmi", "--force", name).returncode == 0


@pytest.fixture
def node(image: str, cluster: Cluster, secret_file: Path) -> Iterator[Node]:
    made = Node(image, cluster.root, secret_file)
    yield made
    made.close()


def test_the_image_says_what_it_is(image: str) -> None:
    done = ran(
        "podman",
        "--runtime",
        "runc",
        "run",
        "--rm",
        "--network",
        "host",
        *_LIMITS,
        image,
        "--version",
    )
    assert re.fullmatch(r"infiniswap \d+\.\d+\.\d+\S*\n", done.stdout), done.stderr


def test_a_job_pages_to_a_donor_in_a_pod(node: Node, cluster: Cluster, secret_file: Path) -> None:
    donor = pod("donor.yaml")
    (prepare,), (daemon,) = donor["initContainers"], donor["containers"]
    address = f"127.0.0.1:{free_port()}"
    env = {**SETTINGS, "INFINISWAP_DAEMON_LISTEN": address}  # to both: a donor's name has its port
    done = ran(*node.argv(prepare, env, "--rm"), wait_s=_BUILD_S)
    assert done.returncode == 0, done.stderr
    assert [one.fs_type for one in mounted(node)] == ["tmpfs"]

    log = cluster.root / "pod.log"
    with log.open("wb") as output:
        argv = node.argv(daemon, env, "--name", node.name)
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    ask = [sys.executable, "-m", "infiniswap", "status", "--json", "--donors", address]

    def status() -> Any:
        assert process.poll() is None, log.read_text()
        (row,) = json.loads(ran(*ask, env=cluster.env).stdout)["donors"]
        return row["status"]

    found = until(status, "the donor in the pod")
    assert not any("restart of the daemon loses" in line for line in found["degraded"]), found

    runner = Runner(cluster)
    summary = runner.summary(*touch(96), options=("--donors", address, "--size", "256M"))
    assert summary["page_out_bytes"] > 0
    assert summary["remote_share"] > 0

    hook = daemon["lifecycle"]["preStop"]["exec"]["command"]
    done = ran("podman", "exec", node.name, *hook, wait_s=_BUILD_S)
    assert done.returncode == 0, done.stderr
    drained = until(status, "the donor after its hook")
    assert drained["draining"]
    assert drained["pool"]["slabs_mapped"] == 0
    assert ran("podman", "stop", "--time", "60", node.name).returncode == 0
    assert process.wait(60) == 0, log.read_text()

    # The next pod lends again; what the last one leaves behind goes.
    done = ran(*node.argv(prepare, SETTINGS, "--rm"), wait_s=_BUILD_S)
    assert done.returncode == 0, done.stderr
    assert not list((cluster.root / "state").rglob("*.drain"))
    (release,) = pod("release.yaml")["initContainers"]
    done = ran(*node.argv(release, {}, "--rm"), wait_s=_BUILD_S)
    assert done.returncode == 0, done.stderr
    assert mounted(node) == []


def mounted(node: Node) -> list[mounts.Mount]:
    """What lies in the directory of slabs."""
    return [one for one in mounts.mounts() if Path(one.mount_point).parent == node.slabs]
