"""/openapi.json: the routes, with the bodies that msgspec checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .routes.control import AbortRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

#: path -> its body
_BODIES: dict[str, type] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort": AbortRequest,
}
_STREAMED = ("/v1/completions", "/v1/chat/completions")
_TEXT = {"/metrics": "text/plain"}
#: what may happen beside an answer: on every route, and on those with a body
_ANYWHERE = {
    "401": "No right API key.",
    "403": "A web page of another origin sent it.",
    "500": "A bug; the log has it.",
    "503": "Loading, ending, or the engine is gone.",
    "504": "The engine was silent for too long.",
}
_WITH_BODY = {
    "400": "The request is wrong.",
    "404": "No such model.",
    "408": "The body came too slowly.",
    "409": "In conflict with what runs.",
    "413": "The body is too large.",
    "415": "The body is not JSON by its type.",
    "429": "Too many requests; Retry-After says when.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of ``app``; made once."""
    if app.openapi_schema is None:
        from fastapi.openapi.utils import get_openapi

        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, structs = msgspec.json.schema_components(list(_BODIES.values()), ref_template="#/components/schemas/{name}")
        made.setdefault("components", {})["schemas"] = {**structs, "Error": _ERROR}
        for path, methods in made["paths"].items():
            for operation in methods.values():
                _describe(path, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _describe(path: str, operation: dict[str, Any]) -> None:
    """Body and answers of one operation."""
    body = _BODIES.get(path)
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    content: dict[str, Any] = {_TEXT.get(path, "application/json"): {"schema": {} if path in _TEXT else {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    wrong = _ANYWHERE | (_WITH_BODY if body is not None else {"404": "No such thing.", "409": "In conflict with what runs."})
    for status, text in sorted(wrong.items()):
        answers[status] = {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation["responses"] = answers
