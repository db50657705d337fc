# SPDX-License-Identifier: Apache-2.0
"""OpenAPI documents, made from the message types: the builder, and the daemon's document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from infiniswap.control import messages as m
from infiniswap.control.figures import METRICS_PATH, PAGE_TYPE

_SESSION_TYPES: Final = tuple(dict.fromkeys((*m.TO_DONOR, *m.TO_CONSUMER)))

ANYBODY: Final[tuple[dict[str, list[str]], ...]] = ()
_PROVEN: Final[tuple[dict[str, list[str]], ...]] = ({}, {"clusterSecret": []})

TEXT: Final = str
"""As an answer: the text format of Prometheus."""


Errors = Mapping[str, tuple[type | None, str]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        name: of the operation, for generated clients.
        summary: what it does.
        answer: of a success: a type, TEXT, or dict for any object.
        errors: other statuses: the type of the body, None without one, and when that is.
        body: of the request.
        security: which schemes will do, {} for none; empty: no scheme at all.
        more: further entries of the document.
        success: status of a success.
    """

    name: str
    summary: str
    answer: type | None
    errors: Errors
    body: type | None = None
    security: Sequence[dict[str, list[str]]] = ANYBODY
    more: dict[str, Any] = field(default_factory=dict)
    success: str = "200"


def build(
    info: dict[str, Any],
    paths: dict[str, dict[str, Operation]],
    types: Iterable[type],
    schemes: dict[str, Any],
) -> dict[str, Any]:
    """A document as a JSON-able dict.

    Args:
        info: title, version, description.
        paths: by path and method.
        types: further ones that it describes.
        schemes: how a client shows who it is.
    """
    operations = [operation for methods in paths.values() for operation in methods.values()]
    named = [
        kind
        for operation in operations
        for kind in (operation.answer, operation.body, *(k for k, _ in operation.errors.values()))
        if kind not in (None, TEXT, dict)
    ]
    all_types = tuple(dict.fromkeys((*named, *types)))
    schemas, components = msgspec.json.schema_components(
        all_types, ref_template="#/components/schemas/{name}"
    )
    reference: dict[Any, dict[str, Any]] = dict(zip(all_types, schemas, strict=True))
    document = {
        "openapi": "3.1.0",
        "info": {"license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}, **info},
        "paths": {
            path: {method: _operation(entry, reference) for method, entry in methods.items()}
            for path, methods in paths.items()
        },
        "components": {"schemas": components, "securitySchemes": schemes},
    }
    made: dict[str, Any] = _ecma_patterns(document)
    return made


def _operation(entry: Operation, reference: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    responses = {entry.success: _response(entry.answer, entry.summary, reference)}
    for status, (kind, description) in entry.errors.items():
        responses[status] = _response(kind, description, reference)
    operation: dict[str, Any] = {
        "operationId": entry.name,
        "summary": entry.summary,
        "responses": responses,
        **entry.more,
    }
    if entry.security:
        operation["security"] = list(entry.security)
    if entry.body is not None:
        content = {"application/json": {"schema": reference[entry.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(
    kind: type | None, description: str, reference: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    if kind is None:
        return {"description": description}
    if kind is TEXT:
        content = {PAGE_TYPE.partition(";")[0]: {"schema": {"type": "string"}}}
    else:
        schema = {"type": "object"} if kind is dict else reference[kind]
        content = {"application/json": {"schema": schema}}
    return {"description": description, "content": content}


def _ecma_patterns(node: Any) -> Any:
    """JSON Schema's regular expressions are those of ECMA-262, which has no \\Z."""
    if isinstance(node, dict):
        return {
            key: value.replace(r"\Z", "$")
            if key == "pattern" and isinstance(value, str)
            else _ecma_patterns(value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_ecma_patterns(value) for value in node]
    return node


# ------------------------------------------------------------------------ the daemon's

_BROWSER: Final[Errors] = {
    "403": (m.HttpError, "A web page asks (a request with an Origin header)")
}
_FULL: Final[Errors] = {"503": (None, "Too many connections")}
_SECRET: Final[Errors] = {"401": (m.HttpError, "The proof is missing or wrong")}
_OPEN: Final[Errors] = {**_BROWSER, **_FULL}
_CLOSED: Final[Errors] = {**_SECRET, **_OPEN}


def _paths() -> dict[str, dict[str, Operation]]:
    paths = {
        m.STATUS_PATH: Operation(
            "status", "The donor's state", m.Status, _CLOSED, security=_PROVEN
        ),
        m.VERSION_PATH: Operation("version", "Who answers here", m.VersionInfo, _OPEN),
        m.NONCE_PATH: Operation("nonce", "A nonce for one request", m.NonceInfo, _OPEN),
        m.OPENAPI_PATH: Operation("openapi", "This document", dict, _CLOSED, security=_PROVEN),
        METRICS_PATH: Operation(
            "metrics",
            "Metrics in the text format of Prometheus",
            TEXT,
            {**_CLOSED, "401": (m.HttpError, "Token and proof are missing or wrong")},
            security=(*_PROVEN, {"metricsToken": []}),
        ),
        m.SESSION_PATH: Operation(
            "session",
            "Opens a session (WebSocket): frames are the messages below",
            None,
            {**_OPEN, "400": (m.HttpError, "Not a WebSocket request for this protocol")},
            success="101",
        ),
    }
    posts = {
        m.DRAIN_PATH: Operation(
            "drain", "Takes every slab back, lends none", m.DrainInfo, _CLOSED, security=_PROVEN
        ),
        m.DRAIN_FORCE_PATH: Operation(
            "drainForce",
            "Likewise, and takes slabs that hold the only copies of pages in the end",
            m.DrainInfo,
            _CLOSED,
            security=_PROVEN,
        ),
        m.UNDRAIN_PATH: Operation("undrain", "Lends again", m.DrainInfo, _CLOSED, security=_PROVEN),
        m.PAGE_LINK_PATH: Operation(
            "pageLink",
            "A link that lets one browser in at the page /ui",
            m.PageLink,
            _CLOSED,
            security=_PROVEN,
        ),
    }
    return {
        **{path: {"get": operation} for path, operation in paths.items()},
        **{path: {"post": operation} for path, operation in posts.items()},
    }


_SCHEMES: Final = {
    "clusterSecret": {
        "type": "apiKey",
        "in": "header",
        "name": "Authorization",
        "description": "`Infiniswap NONCE:PROOF` with a nonce of /v1/nonce and the HMAC-SHA256 "
        "under the session key (drain and undrain: the operator key) over role, SHA-256 digest of "
        "the server's certificate, method, path and nonce, each preceded by its length as 4 bytes, "
        "big-endian. The keys come from the cluster secret by HKDF-SHA256. The answer has the "
        "donor's own proof in the header Infiniswap-Proof.",
    },
    "metricsToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The text of cluster.metrics_token_file.",
    },
}


def document(software: str) -> dict[str, Any]:
    """The document of the daemon's control API.

    Args:
        software: version of the daemon.
    """
    info = {
        "title": "Infiniswap control API",
        "version": software,
        "description": m.__doc__ or "",
    }
    made = build(info, _paths(), _SESSION_TYPES, _SCHEMES)

    def references(types: Iterable[type]) -> list[dict[str, str]]:
        return [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in types]

    session = made["paths"][m.SESSION_PATH]["get"]
    session["parameters"] = [
        {
            "name": "Sec-WebSocket-Protocol",
            "in": "header",
            "required": True,
            "schema": {"const": m.SUBPROTOCOL},
        }
    ]
    session["x-messages-to-donor"] = references(m.TO_DONOR)
    session["x-messages-to-consumer"] = references(m.TO_CONSUMER)
    return made
