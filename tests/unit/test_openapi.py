# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI documents of daemon and device: valid, and of every route there is, both ways."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from infiniswap.control import messages as m
from infiniswap.control import openapi as donor_openapi
from infiniswap.control.key_ring import KeyRing
from infiniswap.control.server import ControlServer
from infiniswap.control.service import ServerConfig
from infiniswap.control.tls import ServerTls
from infiniswap.device.process.control_socket import application
from infiniswap.device.process.control_socket import document as device_document
from infiniswap.keys import derive

DOCUMENTS = {
    "daemon": donor_openapi.document("1.2.3"),
    "device": device_document("1.2.3"),
}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_document_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    assert document == json.loads(json.dumps(document))
    assert r"\Z" not in json.dumps(document), "no regular expression of JSON Schema's"


def test_every_message_of_a_session_is_described() -> None:
    kinds: tuple[type, ...] = (*m.TO_DONOR, *m.TO_CONSUMER, m.Status)
    assert {kind.__name__ for kind in kinds} <= DOCUMENTS["daemon"]["components"]["schemas"].keys()


def _routes(router: Any) -> set[tuple[str, str]]:
    return {
        (route.method.lower(), route.resource.canonical)
        for route in router.routes()
        if route.method != "HEAD"  # comes with each GET
    }


NO_TLS = ServerTls(cast(Any, None), b"")


def _described(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method, path) for path, methods in document["paths"].items() for method in methods}


class _Page:
    def make_link(self) -> tuple[str, int]:
        raise NotImplementedError

    async def moved(self, request: Any) -> Any: ...

    async def file(self, request: Any) -> Any: ...

    async def live(self, request: Any, admitted: Any, signed_in: Any) -> Any: ...


def test_each_document_has_every_route_of_its_process_and_no_other() -> None:
    server = ControlServer(None, ServerConfig(NO_TLS, KeyRing(derive(b"x"), None, lambda: 0.0)))  # type: ignore[arg-type]
    server.add_page(_Page())
    routes = _routes(server._port.router)
    # The page's own are for its own files.
    assert _described(DOCUMENTS["daemon"]) == {
        (method, path) for method, path in routes if not path.startswith(m.PAGE_PATH)
    }
    app = application(None)  # type: ignore[arg-type]
    assert _described(DOCUMENTS["device"]) == _routes(app.router)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_operations_have_names_of_their_own_and_say_how_they_fail(document: dict[str, Any]) -> None:
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    schemes = document["components"]["securitySchemes"]
    used: set[str] = set()
    for operation in operations:
        assert operation["summary"]
        for choice in operation.get("security", ()):
            used |= set(choice)
            assert "401" in operation["responses"], operation
    assert used == set(schemes)
