"""JSON schemas: what is accepted is kept, by the word of another validator; what cannot be kept is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rorqual.engine.grammar.schema_check import check_schema
from tests.grammar.test_guides import allowed
from tests.grammar.words import compiled, guides, ids, request, text_of

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")

INTEGER, STRING = {"type": "integer"}, {"type": "string", "maxLength": 4}
KEPT = {
    "any": True,
    "object": {"type": "object"},
    "required": {"type": "object", "properties": {"a": INTEGER, "b": STRING, "c": {"type": "null"}}, "required": ["b"]},
    "closed": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 3},
    "names": {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "maxProperties": 2},
    "patterns": {"type": "object", "patternProperties": {"^x[0-9]$": INTEGER}, "additionalProperties": False},
    "list": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    "nested": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3},
    "range": {"type": "integer", "minimum": -3, "maximum": 120},
    "open range": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 12},
    "numbers": {"type": "number", "minimum": 0.5, "maximum": 2.5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,3}-[0-9]$"},
    "date": {"type": "string", "format": "date"},
    "choice": {"enum": ["a", 1, None, {"b": [True]}]},
    "constant": {"const": {"a": [1, "x"]}},
    "either": {"anyOf": [STRING, {"type": "null"}, {"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k"]}]},
    "types": {"type": ["integer", "null", "boolean"]},
    "types with limits": {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 5, "maximum": 77},
    "references": {"$defs": {"n": INTEGER, "p": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}},
                   "type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2},
    "tree": {"type": "object", "properties": {"v": INTEGER, "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
    "one of": {"type": "object", "properties": {"s": {"oneOf": [INTEGER, {"type": "string", "maxLength": 2}]}}, "required": ["s"]},
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_whatever_the_masks_allow_keeps_the_schema(name):
    schema = KEPT[name]
    grammar, draw, found = compiled(json=json.dumps(schema)), np.random.default_rng(len(name)), guides()
    validator, whole = jsonschema.Draft202012Validator(schema, format_checker=None), 0
    close = {*ids('"}]019'), 1}
    for walk in range(12):
        one = request(grammar, str(walk))
        found.enter(one)
        tokens, ended = [], False
        for step in range(300):
            may = allowed(found, one)
            finish = [t for t in may if t in close] if step > 30 else []
            tokens.append(int(draw.choice(finish or may)))
            ended, problem = found.accept(one, tokens[-1])
            assert problem is None
            if ended:
                break
        found.leave(str(walk))
        if ended:
            whole += 1
            validator.validate(json.loads(text_of(tokens)))
    assert whole >= 3, "the walks hardly ever come to an end"


REFUSED = {
    "'uniqueItems'": {"type": "array", "uniqueItems": True},
    "'contains'": {"type": "array", "contains": {}},
    "'not'": {"not": {"type": "string"}},
    "'if'": {"type": "object", "if": {}, "then": {}},
    "'dependentRequired'": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "'nullable'": {"type": "string", "nullable": True},
    "several schemas": {"allOf": [{"type": "integer"}, {"type": "integer", "maximum": 3}]},
    "beside '.ref'": {"$defs": {"x": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x", "maximum": 3}}},
    "'properties' beside 'anyOf'": {"type": "object", "properties": {}, "anyOf": [{"required": ["b"], "type": "object"}]},
    "same schema": {"$ref": "https://example.com/x"},
    "formats that can be kept": {"type": "string", "format": "regex"},
    "of which only one": {"type": "string", "pattern": "a", "minLength": 3},
    "without the type": {"minimum": 3},
    "not of its type": {"type": "string", "enum": ["a", 1]},
    "names 'int'": {"type": "int"},
    "must be a list that is not empty": {"anyOf": []},
    "the schema.properties.a.items": {"type": "object", "properties": {"a": {"type": "array", "items": 3}}},
    "unknownWord": {"type": "object", "unknownWord": 1},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        check_schema(REFUSED[message])


def test_notes_are_no_constraints():
    check_schema({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "d", "type": "object",
                  "properties": {"a": {"type": "string", "default": "x", "examples": ["y"], "deprecated": True}}})  # fmt: skip
