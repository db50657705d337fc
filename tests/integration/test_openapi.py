# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI documents that real processes serve, against what the same processes answer."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator
from support.devices.cluster import WAIT_S, Cluster
from support.donors.donor_world import KEYS

from infiniswap.control.auth import HttpRequest, http_authorization
from infiniswap.control.tls import client_context
from infiniswap.device.control.client import _UnixConnection
from infiniswap.keys import Keys

pytestmark = pytest.mark.requires_native


def check(connection: http.client.HTTPConnection, keys: Keys | None) -> set[str]:
    """Every GET of the document that this end serves, as it is described; and wrong ones."""

    def ask(method: str, path: str, **headers: str) -> tuple[int, str, bytes]:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        kind = answer.headers.get_content_type()
        return answer.status, kind, answer.read()

    def proof(method: str, path: str) -> dict[str, str]:
        if keys is None:
            return {}
        nonce = json.loads(ask("GET", "/v1/nonce")[2])
        assert isinstance(connection.sock, ssl.SSLSocket)
        digest = hashlib.sha256(connection.sock.getpeercert(binary_form=True) or b"").digest()
        request = HttpRequest(digest, method, path, nonce["nonce"])
        key = keys.operator if "drain" in path else keys.session
        assert key is not None
        return {"Authorization": http_authorization(key, request)}

    path = "/v1/openapi.json"
    status, _, body = ask("GET", path, **proof("GET", path))
    assert status == 200
    document = json.loads(body)

    def is_described(responses: Any, status: int, kind: str, body: bytes) -> None:
        (found, described), *others = responses[str(status)]["content"].items()
        assert (found, others) == (kind, [])
        if kind == "application/json":
            schema = {**described["schema"], "components": document["components"]}
            OAS31Validator(schema).validate(json.loads(body))

    asked = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            protected = "security" in operation
            if protected and keys is not None:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    answer = ask(method.upper(), path, **headers)
                    assert answer[0] == 401, path
                    is_described(responses, *answer)
            if method == "post" and "requestBody" in operation:
                answer = ask("POST", path)  # without a body: not a request of this API
                assert answer[0] == 409
                is_described(responses, *answer)
            elif "101" in responses:
                answer = ask("GET", path)
                assert answer[0] == 400
                is_described(responses, *answer)
            else:
                right = proof(method.upper(), path) if protected else {}
                answer = ask(method.upper(), path, **right)
                assert answer[0] == 200, (path, answer)
                is_described(responses, *answer)
            if "403" in responses:
                answer = ask(method.upper(), path, Origin="http://a.page")
                assert answer[0] == 403
                is_described(responses, *answer)
            asked.add(path)
    return asked


def test_both_answer_as_their_documents_say(cluster: Cluster, secret_file: Path) -> None:
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    donor = cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", size="64M")
    connection = http.client.HTTPSConnection(
        "127.0.0.1", donor.control, timeout=WAIT_S, context=client_context()
    )
    paths = check(connection, KEYS)
    connection.close()
    assert {"/v1/status", "/v1/drain", "/v1/session", "/metrics"} <= paths
    unix = _UnixConnection(device.run / "control.sock", WAIT_S)
    assert {"/v1/device", "/v1/stop", "/metrics"} <= check(unix, None)
    unix.close()
    # What was wrong has harmed nobody.
    assert device.status["state"] == "serving"
