# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of the control API, made from the message types."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from infiniswap.control import messages as m

_HTTP_TYPES: Final = (m.Status, m.DrainInfo, m.VersionInfo, m.NonceInfo, m.HttpError)
_SESSION_TYPES: Final = tuple(dict.fromkeys((*get_args(m.ToDonor), *get_args(m.ToConsumer))))


def document(software: str) -> dict[str, Any]:
    """The document as a JSON-able dict.

    Args:
        software: version of the daemon.
    """
    types = (*_HTTP_TYPES, *_SESSION_TYPES)
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    reference = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Infiniswap control API",
            "version": software,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": m.__doc__ or "",
        },
        "paths": {
            m.STATUS_PATH: _get("The donor's state", reference[m.Status], reference),
            m.DRAIN_PATH: _post("Takes every slab back, lends none", reference),
            m.UNDRAIN_PATH: _post("Lends again", reference),
            m.VERSION_PATH: _get("Who answers here", reference[m.VersionInfo], None),
            m.NONCE_PATH: _get("A nonce for one request", reference[m.NonceInfo], None),
            m.OPENAPI_PATH: _get("This document", {"type": "object"}, reference),
            m.SESSION_PATH: {
                "get": {
                    "summary": "Opens a session (WebSocket)",
                    "parameters": [
                        {
                            "name": "Sec-WebSocket-Protocol",
                            "in": "header",
                            "required": True,
                            "schema": {"const": m.SUBPROTOCOL},
                        }
                    ],
                    "responses": {"101": {"description": "Frames are the messages below"}},
                    "x-messages-to-donor": [reference[k] for k in get_args(m.ToDonor)],
                    "x-messages-to-consumer": [reference[k] for k in get_args(m.ToConsumer)],
                }
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {
                "clusterSecret": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "`Infiniswap NONCE:PROOF` with a nonce of /v1/nonce and the "
                    "HMAC-SHA256 of the cluster secret over role, method, path and nonce, each "
                    "preceded by its length as 4 bytes, big-endian. Needed only where the "
                    "daemon has a secret.",
                }
            },
        },
    }


def _get(
    summary: str, schema: dict[str, Any], protected: dict[Any, dict[str, Any]] | None
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {
                "description": summary,
                "content": {"application/json": {"schema": schema}},
            }
        },
    }
    if protected is not None:
        operation["security"] = [{}, {"clusterSecret": []}]
        operation["responses"]["401"] = {
            "description": "The proof is missing or wrong",
            "content": {"application/json": {"schema": protected[m.HttpError]}},
        }
    return {"get": operation}


def _post(summary: str, reference: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """A request without a body; the proof covers method and path."""
    return {"post": _get(summary, reference[m.DrainInfo], reference)["get"]}
