"""What a caller may ask of the output's form. Names follow vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

#: fields of which exactly one is given
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of one completion: exactly one kind. Every value is checked; ValueError names field and value.

    The output ends where the form is complete: ``ignore_eos`` has no effect, and ``min_tokens`` only where the form can go on.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as text or as a dict
    regex: str | None = None  # a regular expression that the whole output matches
    choice: Sequence[str] | None = None  # texts, one of which is the output
    grammar: str | None = None  # a grammar in EBNF (GBNF's notation) whose first rule is ``root``
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # a structural tag of xgrammar, as JSON text or as a dict
    disable_any_whitespace: bool = False  # JSON in one line, with one space after each comma and colon

    def __post_init__(self) -> None:
        """Check the fields; ``choice`` is kept as a tuple."""
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(KINDS)}, found {', '.join(given) or 'none'}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a text that is not empty, found {value!r}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, Mapping)):
                raise ValueError(f"structured_outputs.{name} must be JSON, as text or as a dict, found {type(value).__name__}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise ValueError(f"structured_outputs.{name} must be True or False, found {getattr(self, name)!r}")

    @classmethod
    def of(cls, values: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
        """From a dict of the fields.

        Raises:
            ValueError: names that are none, or see the fields.
        """
        if isinstance(values, StructuredOutputsParams):
            return values
        if not isinstance(values, Mapping):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams or a dict of its fields, found {type(values).__name__}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"structured_outputs has unknown fields {unknown}; known are {known}")
        return cls(**values)

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values; fields at their default are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Form:
    """All that one output has to be: reasoning first, where the model reasons, then what was asked for, or calls of tools."""

    asked: StructuredOutputsParams | None = None
    tools: Mapping[str, Any] | None = None  # arguments of xgrammar's ``get_model_structural_tag``
    reasoning: str = "disabled"  # the output begins inside it ("enabled"), may begin with it ("auto"), or has none
    begin: str = "<think>"  # its marks
    end: str = "</think>"

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values."""
        asked = None if self.asked is None else self.asked.to_wire()
        return {"asked": asked, "tools": self.tools, "reasoning": self.reasoning, "begin": self.begin, "end": self.end}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> Form:
        """The inverse of ``to_wire``."""
        asked = values["asked"]
        return cls(**{**values, "asked": None if asked is None else StructuredOutputsParams.of(asked)})


def as_json(value: str | Mapping[str, Any], what: str) -> Any:
    """``value``, read if it is text.

    Raises:
        ValueError: it is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from None


def _choices(values: Sequence[str]) -> tuple[str, ...]:
    """Choices as a tuple; ValueError for anything but texts that are not empty."""
    if not isinstance(values, Sequence) or isinstance(values, str) or not values or not all(isinstance(v, str) and v for v in values):
        raise ValueError(f"structured_outputs.choice must be a list of texts that are not empty, found {values!r}")
    return tuple(values)
