"""Which form a request asks for, in any of the spellings that clients use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...grammar.structured import StructuredOutputsParams

#: older spellings of vLLM -> fields of ``StructuredOutputsParams``
_GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object", "structural_tag": "structural_tag",
}  # fmt: skip
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def asked_form(body: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form that ``body`` (a request as sent) asks for, None for none.

    Raises:
        ValueError: a malformed field, or two fields that each ask for a form.
    """
    found: dict[str, StructuredOutputsParams] = {}
    if body.get("response_format") is not None:
        form = _response_format(body["response_format"])
        if form is not None:
            found["response_format"] = form
    if body.get("structured_outputs") is not None:
        found["structured_outputs"] = StructuredOutputsParams.of(body["structured_outputs"])
    for name, field in _GUIDED.items():
        if body.get(name) is not None and body[name] is not False:
            found[name] = StructuredOutputsParams.of({field: body[name]})
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} each ask for a form of the output; send one of them")
    return next(iter(found.values()), None)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    """OpenAI's ``response_format``."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _FORMATS:
        raise ValueError(f"response_format must be an object whose type is one of {', '.join(_FORMATS)}, found {str(value)[:200]}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(value))
    named = value.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise ValueError("response_format.json_schema must be an object with the schema under 'schema'")
    if not isinstance(named["schema"], Mapping):
        raise ValueError(f"response_format.json_schema.schema must be a JSON schema (an object), found {type(named['schema']).__name__}")
    return StructuredOutputsParams(json=dict(named["schema"]))
