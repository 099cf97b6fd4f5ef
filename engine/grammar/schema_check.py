"""Refuses JSON schemas that a grammar would not keep: better no output than one that breaks the schema in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: keywords that say nothing about a value
_NOTES = frozenset({"$schema", "$id", "$comment", "$anchor", "title", "description", "default", "examples", "deprecated", "readOnly",
                    "writeOnly", "contentEncoding", "contentMediaType", "discriminator", "$defs", "definitions"})  # fmt: skip
#: keywords that the grammar keeps for one type of value, which the schema has to name
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
               "unevaluatedProperties"},
}  # fmt: skip
#: keywords that decide alone: others beside them would be left out
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
_FORMATS = frozenset({"date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "uri-reference",
                      "uri-template", "json-pointer", "relative-json-pointer"})  # fmt: skip
_TYPES = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
_CHILDREN = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
#: levels of schemas in schemas
_DEEPEST = 64


def check_schema(schema: Any) -> None:
    """Refuse what the grammar of ``schema`` would not keep.

    Raises:
        ValueError: naming the place and the keyword.
    """
    for where, part in _parts(schema, "the schema", 0):
        if isinstance(part, Mapping):
            _check(part, where)


def _parts(schema: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every schema in ``schema`` with its place."""
    if depth > _DEEPEST:
        raise ValueError(f"the schema is nested deeper than {_DEEPEST} levels")
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"{where} must be a JSON object or a boolean, found {type(schema).__name__}")
    yield where, schema
    if isinstance(schema, bool):
        return
    for name in _CHILDREN:
        if name in schema:
            yield from _parts(schema[name], f"{where}.{name}", depth + 1)
    for name in _LISTS:
        if name in schema:
            if not isinstance(schema[name], list) or not schema[name]:
                raise ValueError(f"{where}.{name} must be a list that is not empty")
            for i, part in enumerate(schema[name]):
                yield from _parts(part, f"{where}.{name}[{i}]", depth + 1)
    for name in _NAMED:
        if name in schema:
            if not isinstance(schema[name], Mapping):
                raise ValueError(f"{where}.{name} must be a JSON object")
            for key, part in schema[name].items():
                yield from _parts(part, f"{where}.{name}.{key}", depth + 1)


def _check(part: Mapping[str, Any], where: str) -> None:
    """One schema, without those in it."""
    types = _types(part, where)
    _check_alone(part, types, where)
    allowed = set(_NOTES) | {"type", *_ALONE}
    for name, words in _OF_TYPE.items():
        if name in types or (name == "number" and "integer" in types):
            allowed |= words
    wrong = sorted(set(part) - allowed)
    if "nullable" in wrong:
        raise ValueError(f"{where} has 'nullable', which is no JSON schema; write the type as a list with 'null'")
    known = {word for words in _OF_TYPE.values() for word in words}
    if wrong and wrong[0] in known:
        raise ValueError(f"{where} has {wrong[0]!r} without the type it is for; add 'type'")
    if wrong:
        raise ValueError(f"{where} has {wrong[0]!r}, which structured output cannot keep; leave it out, and check the output yourself")
    _check_string(part, where)


def _types(part: Mapping[str, Any], where: str) -> set[str]:
    """Types that the schema names; implied by keywords of objects and arrays, as everybody writes them."""
    given = part.get("type", [])
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{where}.type must be the name of a type or a list of them, found {given!r}")
    unknown = sorted(set(names) - {*_TYPES, "integer", "number"})
    if unknown:
        raise ValueError(f"{where}.type names {unknown[0]!r}; types are {sorted({*_TYPES, 'integer', 'number'})}")
    implied = {} if names else {"properties": "object", "items": "array", "prefixItems": "array"}
    if where.endswith(".propertyNames"):
        names = names or ["string"]
    return {*names, *(kind for word, kind in implied.items() if word in part)}


def _check_alone(part: Mapping[str, Any], types: set[str], where: str) -> None:
    """Keywords that decide alone stand alone."""
    deciding = [word for word in _ALONE if word in part]
    if not deciding:
        return
    word = deciding[0]
    others = sorted(set(part) - _NOTES - {word, "type"})
    if others:
        raise ValueError(f"{where} has {others[0]!r} beside {word!r}, which would be left out; put both into one schema")
    if word == "$ref":
        target = part["$ref"]
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise ValueError(f"{where}.$ref is {target!r}; only places in the same schema ('#/...') can be kept")
    elif word == "allOf" and len(part["allOf"]) > 1:
        raise ValueError(f"{where}.allOf has several schemas, which structured output cannot keep together; write them as one")
    elif word in ("const", "enum"):
        values = [part["const"]] if word == "const" else part["enum"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}.enum must be a list that is not empty")
        odd = [v for v in values if types and not any(_is(v, kind) for kind in types)]
        if odd:
            raise ValueError(f"{where}.{word} has {odd[0]!r}, which is not of its type {sorted(types)}")


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (whole if kind == "integer" else isinstance(value, (int, float)))
    return isinstance(value, _TYPES[kind])


def _check_string(part: Mapping[str, Any], where: str) -> None:
    """Of pattern, format and lengths one kind is kept."""
    kinds = [name for name, words in (("pattern", {"pattern"}), ("format", {"format"}), ("lengths", {"minLength", "maxLength"}))
             if words & set(part)]  # fmt: skip
    if len(kinds) > 1:
        raise ValueError(f"{where} has {' and '.join(kinds)}, of which only one can be kept; write a pattern that says both")
    if "format" in part and part["format"] not in _FORMATS:
        raise ValueError(f"{where}.format is {part['format']!r}; formats that can be kept are {sorted(_FORMATS)}")
